#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/transport/nccl/device_lane.h"

namespace farandole::transport {

// A group as the watch sees it. Any thread.
class WatchedGroup {
 public:
  virtual ~WatchedGroup() = default;
  // Ok, or why the group is over: its ranks, NCCL.
  virtual Status health() = 0;
  // Ends the group and all its operations. Only the first call counts.
  virtual void fail(const Status& why) = 0;
  // What may be done late: after every wake(), and now and then while something is under way.
  virtual void attend() {}
};

// Sees to the operations that are under way on devices, for all groups of a process: ends those that the device is
// done with, and the groups that are broken or late. One thread, which sleeps while nothing is under way.
class DeviceWatch {
 public:
  explicit DeviceWatch(const CudaApi& cuda);
  // Nothing is watched any more.
  ~DeviceWatch();
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  // From now on, until both are gone. `device`: the lane's.
  void watch(const std::weak_ptr<WatchedGroup>& group, int device, const std::weak_ptr<DeviceLane>& lane);
  // Something was added to a lane.
  void wake();
  // Nothing is looked at any more; for the end of the process, before the libraries go. Not on its own thread.
  void stop();

 private:
  struct State;
  static void run(const CudaApi& cuda, State& state);

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace farandole::transport
