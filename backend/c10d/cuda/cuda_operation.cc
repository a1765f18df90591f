#include "backend/c10d/cuda/cuda_operation.h"

#include "backend/c10d/flight_tensors.h"

namespace farandole::backend {

CudaOperation::CudaOperation(const WorkOptions& options, std::string text, std::vector<at::Tensor> results,
                             std::vector<at::Tensor> kept)
    : DeviceOperation(transport::DeviceClock::now() + options.timeout),
      options_(options),
      text_(std::move(text)),
      results_(std::move(results)),
      kept_(std::move(kept)) {}

void CudaOperation::recordCollective() {
  if (options_.flight == nullptr) return;
  observe::FlightRecord record = options_.flight->record(options_.title, options_.timeout, options_.sequence, false);
  recordTensors(record, options_.type, results_, kept_);
  const std::uint64_t number = options_.flight->recorder().reserve(1);
  options_.flight->recorder().write(number, record, observe::FlightState::kStarted);
  flightNumber_ = number;
}

void CudaOperation::recordMessage(int peer, bool isSend) {
  if (options_.flight == nullptr) return;
  observe::FlightRecord record = options_.flight->record(options_.title, options_.timeout, options_.sequence, true);
  record.peer = static_cast<std::int16_t>(peer);
  backend::recordMessage(record, isSend ? kept_[0] : results_[0], isSend);
  const std::uint64_t number = options_.flight->recorder().reserve(1);
  options_.flight->recorder().write(number, record, observe::FlightState::kStarted);
  flightNumber_ = number;
}

void CudaOperation::ending(const Status& status) {
  if (const std::uint64_t number = flightNumber_; number != kNotRecorded) options_.flight->end(number, 1, status);
  if (!options_.onDone) return;
  options_.onDone({options_.type, options_.sequence, 0, status.isOk(), started_, std::chrono::steady_clock::now()});
}

void CudaOperation::dropBuffers() {
  results_.clear();
  kept_.clear();
}

}  // namespace farandole::backend
