#include "backend/c10d/cuda/cuda_operation.h"

#include "backend/c10d/flight_tensors.h"
#include "backend/common/deadline.h"

namespace farandole::backend {
namespace {

std::size_t bytesOf(const std::vector<at::Tensor>& tensors) {
  std::size_t bytes = 0;
  // What is sparse has no bytes of its own.
  for (const at::Tensor& tensor : tensors) bytes += tensor.is_sparse() ? 0 : tensor.nbytes();
  return bytes;
}

}  // namespace

CudaOperation::CudaOperation(const WorkOptions& options, std::vector<at::Tensor> results, std::vector<at::Tensor> kept)
    : DeviceOperation(deadlineIn(options.timeout)),
      options_(options),
      peer_(kNobody),
      isSend_(false),
      tag_(0),
      bytes_(bytesOf(results.empty() ? kept : results)),
      key_(options.key),
      results_(std::move(results)),
      kept_(std::move(kept)) {}

CudaOperation::CudaOperation(const WorkOptions& options, const CudaMessage& message)
    : DeviceOperation(deadlineIn(options.timeout)),
      options_(options),
      peer_(message.peer),
      isSend_(message.isSend),
      tag_(message.tag),
      bytes_(message.tensor.nbytes()),
      key_(message.key) {
  (isSend_ ? kept_ : results_).push_back(message.tensor);
}

std::string CudaOperation::describe() const {
  std::string text = ::c10d::opTypeToString(options_.type);
  if (peer_ != kNobody)
    text =
        (isSend_ ? "send to rank " : "recv from rank ") + std::to_string(peer_) + " with tag " + std::to_string(tag_);
  return text + " number " + std::to_string(options_.sequence) + " on rank " + std::to_string(options_.rank) + " (" +
         std::to_string(bytes_) + " bytes on CUDA)";
}

void CudaOperation::record() {
  if (options_.flight == nullptr) return;
  const bool isMessage = peer_ != kNobody;
  observe::FlightRecord record =
      options_.flight->record(options_.title, options_.timeout, options_.sequence, isMessage);
  if (isMessage) {
    record.peer = static_cast<std::int16_t>(peer_);
    recordMessage(record, isSend_ ? kept_[0] : results_[0], isSend_);
  } else {
    recordTensors(record, options_.type, results_, kept_);
  }
  const std::uint64_t number = options_.flight->recorder().reserve(1);
  options_.flight->recorder().write(number, record, observe::FlightState::kStarted);
  flightNumber_ = number;
}

void CudaOperation::ending(const Status& status) {
  if (const std::uint64_t number = flightNumber_; number != kNotRecorded) options_.flight->end(number, 1, status);
  if (!options_.onDone) return;
  options_.onDone(
      {options_.type, options_.sequence, {key_}, status.isOk(), started_, std::chrono::steady_clock::now()});
}

void CudaOperation::whenEnded(std::function<void()> callback) {
  {
    std::lock_guard lock(callbacksMutex_);
    if (!hasEnded()) {  // ended() comes after that, and sees it
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void CudaOperation::ended() {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard lock(callbacksMutex_);
    callbacks.swap(callbacks_);
  }
  for (const auto& callback : callbacks) callback();
}

void CudaOperation::dropBuffers() {
  results_.clear();
  kept_.clear();
}

}  // namespace farandole::backend
