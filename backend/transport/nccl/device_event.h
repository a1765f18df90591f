#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/transport/nccl/cuda_api.h"

namespace farandole::transport {

class EventPool;

// A CUDA event out of a pool, to which it goes back at the end. One thread at a time.
class DeviceEvent {
 public:
  DeviceEvent() = default;
  DeviceEvent(std::shared_ptr<EventPool> pool, cudaEvent_t event) : pool_(std::move(pool)), event_(event) {}
  DeviceEvent(DeviceEvent&& other) noexcept
      : pool_(std::move(other.pool_)), event_(std::exchange(other.event_, nullptr)), isCaptured_(other.isCaptured_) {}
  DeviceEvent& operator=(DeviceEvent&& other) noexcept;
  ~DeviceEvent() { giveBack(); }

  // With `isCaptured` it belongs to a graph from then on: it cannot be asked, and no other operation may use it.
  Status record(cudaStream_t stream, bool isCaptured);
  // What is put on the stream from now on runs after what was recorded.
  Status holdUp(cudaStream_t stream) const;
  // Whether what was recorded has run.
  Result<bool> hasRun() const;
  bool isCaptured() const { return isCaptured_; }

 private:
  void giveBack();

  std::shared_ptr<EventPool> pool_;
  cudaEvent_t event_ = nullptr;
  bool isCaptured_ = false;
};

// The events of one device, without timing; each is used again and again. Any thread.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  EventPool(const CudaApi& cuda, int device) : cuda_(cuda), device_(device) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  Result<DeviceEvent> take();

 private:
  friend class DeviceEvent;

  const CudaApi& cuda_;
  const int device_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

}  // namespace farandole::transport
