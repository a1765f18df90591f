#include "backend/transport/nccl/device_event.h"

namespace farandole::transport {

DeviceEvent& DeviceEvent::operator=(DeviceEvent&& other) noexcept {
  if (this != &other) {
    giveBack();
    pool_ = std::move(other.pool_);
    event_ = std::exchange(other.event_, nullptr);
    isCaptured_ = other.isCaptured_;
  }
  return *this;
}

void DeviceEvent::giveBack() {
  if (event_ == nullptr) return;
  if (isCaptured_) {
    (void)pool_->cuda_.eventDestroy(event_);
  } else {
    std::lock_guard lock(pool_->mutex_);
    pool_->free_.push_back(event_);
  }
  event_ = nullptr;
  pool_.reset();
}

Status DeviceEvent::record(cudaStream_t stream, bool isCaptured) {
  isCaptured_ = isCaptured_ || isCaptured;
  return pool_->cuda_.check(pool_->cuda_.eventRecord(event_, stream), "cudaEventRecord");
}

Status DeviceEvent::holdUp(cudaStream_t stream) const {
  return pool_->cuda_.check(pool_->cuda_.streamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
}

Result<bool> DeviceEvent::hasRun() const {
  const cudaError_t result = pool_->cuda_.eventQuery(event_);
  if (result == cudaSuccess) return true;
  if (result == cudaErrorNotReady) {
    (void)pool_->cuda_.getLastError();
    return false;
  }
  return pool_->cuda_.check(result, "cudaEventQuery");
}

EventPool::~EventPool() {
  for (cudaEvent_t event : free_) (void)cuda_.eventDestroy(event);
}

Result<DeviceEvent> EventPool::take() {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      cudaEvent_t const event = free_.back();
      free_.pop_back();
      return DeviceEvent(shared_from_this(), event);
    }
  }
  // An event belongs to the device that is current when it is created.
  const DeviceScope scope(cuda_, device_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  cudaEvent_t event = nullptr;
  FARANDOLE_RETURN_IF_ERROR(cuda_.check(cuda_.eventCreate(&event, cudaEventDisableTiming), "cudaEventCreate"));
  return DeviceEvent(shared_from_this(), event);
}

}  // namespace farandole::transport
