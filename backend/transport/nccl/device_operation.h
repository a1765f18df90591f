#pragma once

#include <atomic>
#include <chrono>
#include <string>

#include "backend/transport/nccl/device_event.h"

namespace farandole::transport {

using DeviceClock = std::chrono::steady_clock;

// An operation on a stream, shared by who waits for it, the lane that it is in and, before its edge is connected, that
// edge's queue. It is queued, then launched (its end is on the stream), then ended, or ended at any time with an error.
// Any thread.
class DeviceOperation {
 public:
  explicit DeviceOperation(DeviceClock::time_point deadline) : deadline_(deadline) {}
  virtual ~DeviceOperation() = default;
  DeviceOperation(const DeviceOperation&) = delete;
  DeviceOperation& operator=(const DeviceOperation&) = delete;

  // Once. The end was recorded; `stream` is where.
  void launched(DeviceEvent end, cudaStream_t stream);
  // What comes first counts; the rest is ignored.
  void finish(const Status& status);

  // Or has ended.
  bool isLaunched() const {
    const State state = state_.load(std::memory_order_acquire);
    return state == State::kLaunched || state == State::kEnded;
  }
  // Blocks the host while the operation is queued, or ends without having been launched.
  void awaitLaunch() const;
  // Ended, or the device has come to its end.
  bool isDone() const;
  bool hasEnded() const { return state_.load(std::memory_order_acquire) == State::kEnded; }
  // Ok while it has not ended.
  Status status() const { return hasEnded() ? status_ : Status::ok(); }
  // Whether the device has come to its end; not while it is queued.
  Result<bool> hasRun() const;
  // What is put on `stream` from now on runs after a launched one; at no cost on the stream that it runs on itself.
  Status holdUp(cudaStream_t stream) const {
    return stream == stream_ || !wasLaunched_ ? Status::ok() : end_.holdUp(stream);
  }
  // Of a launched one: where it runs; and whether it is part of a graph, and has no end of its own.
  cudaStream_t stream() const { return stream_; }
  bool isCaptured() const { return wasLaunched_ && end_.isCaptured(); }
  // It is about to be aborted: that the device comes to its end from now on says nothing.
  void doom() { isDoomed_ = true; }
  // The buffers need not be kept any longer: whoever reuses their memory runs after this operation.
  void letGo();

  DeviceClock::time_point deadline() const { return deadline_; }
  // "all_reduce 7 of group 0 (4194304 bytes)"
  virtual std::string describe() const = 0;

 protected:
  // Called once by finish(), before anybody sees the end.
  virtual void ending(const Status& status) = 0;
  // And once everybody sees it.
  virtual void ended() {}
  // Drops the references to the buffers. Once.
  virtual void dropBuffers() = 0;

 private:
  enum class State : int { kQueued, kLaunched, kEnding, kEnded };

  const DeviceClock::time_point deadline_;
  std::atomic<State> state_{State::kQueued};
  std::atomic<bool> wasLaunched_{false};
  std::atomic<bool> isDoomed_{false};
  std::atomic<bool> isLetGo_{false};
  DeviceEvent end_;
  cudaStream_t stream_ = nullptr;
  Status status_;
};

}  // namespace farandole::transport
