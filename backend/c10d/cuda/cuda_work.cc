#include "backend/c10d/cuda/cuda_work.h"

#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "backend/c10d/callback_threads.h"
#include "backend/c10d/errors.h"
#include "backend/c10d/timeouts.h"
#include "backend/common/deadline.h"

namespace farandole::backend {

using transport::DeviceClock;

namespace {

bool blockingWaitSetting() {
  static const bool isSet = ::c10d::getCvarBool({"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"}, false);
  return isSet;
}

}  // namespace

CudaWork::CudaWork(const WorkOptions& options, CudaEnvironment environment, std::weak_ptr<transport::DeviceGroup> group,
                   int device, std::vector<at::Tensor> results, std::vector<std::shared_ptr<CudaOperation>> operations,
                   bool hostWaits)
    : Work(options.rank, options.type),
      environment_(environment),
      group_(std::move(group)),
      device_(device),
      sequence_(options.sequence),
      timeout_(options.timeout),
      key_(options.key),
      results_(std::move(results)),
      operations_(std::move(operations)),
      hostWaits_(hostWaits || blockingWaitSetting()) {}

Status CudaWork::status() const {
  for (const auto& operation : operations_) FARANDOLE_RETURN_IF_ERROR(operation->status());
  return Status::ok();
}

bool CudaWork::isCompleted() {
  return std::ranges::all_of(operations_, [](const auto& operation) { return operation->isDone(); });
}

bool CudaWork::isSuccess() const {
  return std::ranges::all_of(operations_, [](const auto& operation) { return operation->isDone(); }) && status();
}

std::exception_ptr CudaWork::exception() const { return exceptionOf(status()); }

void CudaWork::synchronize() {
  for (const auto& operation : operations_) operation->awaitLaunch();
  throwIfError(status());
  cudaStream_t const current = environment_.currentStream(device_);
  const transport::DeviceScope scope(environment_.runtime->cuda, device_);
  for (const auto& operation : operations_) {
    // One that has ended meanwhile has no event to wait for: the device is done with it, or it failed.
    if (!operation->hasEnded()) throwIfError(operation->holdUp(current));
    // What reuses the memory is put on a stream after this.
    operation->letGo();
  }
  throwIfError(status());
}

bool CudaWork::wait(milliseconds timeout) {
  checkOwnTimeout("wait", timeout);
  const bool isOwn = isUnset(timeout);
  auto deadline = deadlineIn(timeout);
  // The group's watch looks after its own timeout.
  if (!isOwn) {
    awaitOnHost(deadline, [this] {
      return std::ranges::all_of(operations_, [](const auto& operation) { return operation->isLaunched(); });
    });
  }
  synchronize();
  if (isOwn) deadline = deadlineIn(timeout_);
  // What is captured has no end of its own to wait for.
  const bool isCaptured = std::ranges::any_of(operations_, [](const auto& one) { return one->isCaptured(); });
  if ((hostWaits_ || !isOwn) && !isCaptured) awaitOnHost(deadline, [this] { return isCompleted(); });
  return true;
}

template <typename IsDone>
void CudaWork::awaitOnHost(DeviceClock::time_point deadline, const IsDone& isDone) {
  // As often as the watch could be told, at first; a device that takes long is not asked all the time.
  for (std::chrono::microseconds pause{1}; !isDone(); pause = std::min(2 * pause, std::chrono::microseconds(500))) {
    if (DeviceClock::now() >= deadline) {
      throwIfError(Status::timeout(operations_[0]->describe() + ": it did not end within the timeout of wait()"));
    }
    std::this_thread::sleep_for(pause);
  }
  throwIfError(status());
}

void CudaWork::abort() {
  if (const auto group = group_.lock()) group->fail(Status::aborted("Work.abort() was called"));
}

c10::intrusive_ptr<c10::ivalue::Future> CudaWork::getFuture() {
  std::lock_guard lock(futureMutex_);
  if (future_ != nullptr) return future_;
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_));
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{device});
  if (std::ranges::all_of(operations_, [](const auto& operation) { return operation->isLaunched(); })) {
    completeFuture();
  } else {
    // The caller holds the GIL, and an edge that is being connected may wait for a peer.
    runOnCallbackThread([self = c10::intrusive_ptr<CudaWork>::reclaim_copy(this)] { self->completeFuture(); });
  }
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> CudaWork::getFutureResult() {
  std::lock_guard lock(futureMutex_);
  if (futureResult_ != nullptr) return futureResult_;
  futureResult_ = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  if (isCompleted()) {  // nothing is chained to it yet
    completeFutureResult();
    return futureResult_;
  }
  const auto left = std::make_shared<std::atomic<std::size_t>>(operations_.size());
  for (const auto& operation : operations_) {
    operation->whenEnded([self = c10::intrusive_ptr<CudaWork>::reclaim_copy(this), left] {
      if (left->fetch_sub(1) == 1) runOnCallbackThread([self] { self->completeFutureResult(); });
    });
  }
  return futureResult_;
}

void CudaWork::completeFuture() {
  try {
    markLaunched();
  } catch (...) {
    // What is chained to it must not wait for ever.
    if (!future_->completed()) future_->setError(std::current_exception());
  }
}

void CudaWork::markLaunched() {
  for (const auto& operation : operations_) operation->awaitLaunch();
  throwIfError(status());
  // Before the operations have run: who uses the value waits for the stream, and so for them.
  const auto stream =
      c10::cuda::getStreamFromExternal(operations_[0]->stream(), static_cast<c10::DeviceIndex>(device_));
  const c10::StreamGuard guard(stream.unwrap());
  for (const auto& operation : operations_) {
    if (!operation->hasEnded()) throwIfError(operation->holdUp(stream.stream()));
  }
  future_->markCompleted(c10::IValue(results_));
}

}  // namespace farandole::backend
