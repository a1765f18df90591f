#include "backend/transport/nccl/device_operation.h"

#include <utility>

namespace farandole::transport {

void DeviceOperation::launched(DeviceEvent end, cudaStream_t stream) {
  State expected = State::kQueued;
  if (state_.load(std::memory_order_acquire) != expected) return;  // ended before
  end_ = std::move(end);
  stream_ = stream;
  wasLaunched_ = true;
  if (state_.compare_exchange_strong(expected, State::kLaunched, std::memory_order_acq_rel)) state_.notify_all();
}

void DeviceOperation::finish(const Status& status) {
  State state = state_.load(std::memory_order_acquire);
  do {
    if (state == State::kEnding || state == State::kEnded) return;
  } while (!state_.compare_exchange_weak(state, State::kEnding, std::memory_order_acq_rel));
  status_ = status;
  ending(status);
  letGo();
  state_.store(State::kEnded, std::memory_order_release);
  state_.notify_all();
  ended();
}

void DeviceOperation::awaitLaunch() const {
  for (State state = state_.load(std::memory_order_acquire);
       state == State::kQueued || (state == State::kEnding && !wasLaunched_);
       state = state_.load(std::memory_order_acquire)) {
    state_.wait(state);
  }
}

Result<bool> DeviceOperation::hasRun() const {
  const State state = state_.load(std::memory_order_acquire);
  // One that is being ended may have run before.
  if (state == State::kQueued || state == State::kEnded || !wasLaunched_) return state == State::kEnded;
  if (end_.isCaptured()) return false;  // to ask would spoil the capture
  auto run = end_.hasRun();
  // After that look: what had run before it was doomed is well.
  return run && *run && isDoomed_ ? Result<bool>(false) : run;
}

bool DeviceOperation::isDone() const {
  const auto run = hasRun();
  return run && *run;
}

void DeviceOperation::letGo() {
  if (!isLetGo_.exchange(true)) dropBuffers();
}

}  // namespace farandole::transport
