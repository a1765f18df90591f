#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/transport/nccl/group_on_device.h"

namespace farandole::transport {

// One rank's part of a group on devices. Any thread.
class DeviceGroup final : public WatchedGroup, public std::enable_shared_from_this<DeviceGroup> {
 public:
  // `ranksHealth`: ok, or how the group's ranks have ended it elsewhere. `onFailure`: called once with what ended the
  // group, and whether `ranksHealth` said it: else the other ranks should know. Not when abort() was called.
  using Health = std::function<Status()>;
  using OnFailure = std::function<void(const Status& why, bool ranksKnow)>;
  DeviceGroup(DeviceGroupSetup setup, Health ranksHealth, OnFailure onFailure);

  // The part on this device, made on first use.
  Result<std::shared_ptr<GroupOnDevice>> on(int device);

  // The ordinals of the devices whose collectives are connected; none where a smaller group can take nothing over from
  // this one.
  std::vector<int> connectedDevices();
  // All ranks of this group together, before they use it: connects those devices of `parent`, which has the same ranks
  // and the excluded ones.
  Status connectFrom(DeviceGroup& parent, const std::vector<int>& ordinals, const std::vector<int>& excluded);

  Status health() override;
  void fail(const Status& why) override;
  void attend() override;
  // Ends everything; nobody is told.
  void abort(const Status& why);
  // On all devices.
  Status addMemoryUse(NcclMemoryUse& use);
  // Ok, or what ended the group.
  Status status();
  // Waits until what is under way has ended and the peers have it, for as long as `limit`, then aborts what is left and
  // ends the group. What fails from here on is told to nobody: peers may have closed, too.
  void close(std::chrono::milliseconds limit);

 private:
  bool endAll(const Status& why);
  std::vector<std::shared_ptr<GroupOnDevice>> devices();

  const DeviceGroupSetup setup_;
  const Health ranksHealth_;
  const OnFailure onFailure_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<GroupOnDevice>> devices_;
  Status over_;
  std::atomic<bool> isClosing_{false};
};

}  // namespace farandole::transport
