#pragma once

#include <deque>
#include <memory>
#include <mutex>

#include "backend/transport/nccl/device_operation.h"

namespace farandole::transport {

// The operations of one group on one stream that have not ended, in the stream's order. Any thread.
class DeviceLane {
 public:
  // One that is launched, or will be, in this order. Ends it at once where the lane is over.
  void add(std::shared_ptr<DeviceOperation> operation);
  // One that is part of a graph from now on: it has no end.
  void remove(const DeviceOperation& operation);
  // Ends what the device is done with; the error is CUDA's.
  Status sweep();
  // The first that is late at `now`, or null.
  std::shared_ptr<DeviceOperation> findLate(DeviceClock::time_point now);
  bool isEmpty();
  // Ok, or what has ended it.
  Status over();
  // Before the communicators are aborted: what the device comes to the end of from now on has not succeeded.
  void doom(const Status& status);
  // Ends all, and what comes later, with this error.
  void endAll(const Status& status);

 private:
  std::mutex mutex_;
  std::deque<std::shared_ptr<DeviceOperation>> operations_;
  Status over_;
};

}  // namespace farandole::transport
