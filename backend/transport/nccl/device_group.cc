#include "backend/transport/nccl/device_group.h"

#include <algorithm>
#include <future>
#include <thread>
#include <utility>

namespace farandole::transport {
namespace {

constexpr std::chrono::milliseconds kLookAtEnd{1};

}  // namespace

DeviceGroup::DeviceGroup(DeviceGroupSetup setup, Health ranksHealth, OnFailure onFailure)
    : setup_(std::move(setup)), ranksHealth_(std::move(ranksHealth)), onFailure_(std::move(onFailure)) {}

Result<std::shared_ptr<GroupOnDevice>> DeviceGroup::on(int device) {
  std::lock_guard lock(mutex_);
  if (!over_) return over_;
  if (const auto found = devices_.find(device); found != devices_.end()) return found->second;
  auto made = std::make_shared<GroupOnDevice>(setup_, weak_from_this(), device, static_cast<int>(devices_.size()));
  FARANDOLE_RETURN_IF_ERROR(made->begin());
  devices_.emplace(device, made);
  return made;
}

std::vector<std::shared_ptr<GroupOnDevice>> DeviceGroup::devices() {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<GroupOnDevice>> all;
  all.reserve(devices_.size());
  for (const auto& [index, device] : devices_) all.push_back(device);
  return all;
}

std::vector<int> DeviceGroup::connectedDevices() {
  std::vector<int> ordinals;
  if (setup_.runtime->nccl.commShrink == nullptr || !status()) return ordinals;
  for (const auto& device : devices()) {
    if (device->isConnected()) ordinals.push_back(device->ordinal());
  }
  std::ranges::sort(ordinals);
  return ordinals;
}

Status DeviceGroup::connectFrom(DeviceGroup& parent, const std::vector<int>& ordinals,
                                const std::vector<int>& excluded) {
  const auto theirs = parent.devices();
  for (const int ordinal : ordinals) {
    const auto from = std::ranges::find(theirs, ordinal, [](const auto& device) { return device->ordinal(); });
    const auto ours = on((*from)->device());
    if (!ours) return ours.status();
    FARANDOLE_RETURN_IF_ERROR((*ours)->connectFrom(*from, excluded));
  }
  return Status::ok();
}

Status DeviceGroup::status() {
  std::lock_guard lock(mutex_);
  return over_;
}

Status DeviceGroup::addMemoryUse(NcclMemoryUse& use) {
  if (setup_.runtime->nccl.commMemStats == nullptr) return setup_.runtime->nccl.lacks("ncclCommMemStats");
  for (const auto& device : devices()) FARANDOLE_RETURN_IF_ERROR(device->addMemoryUse(use));
  return Status::ok();
}

Status DeviceGroup::health() {
  // Who died is known there first, and by name.
  if (const Status ranks = ranksHealth_(); !ranks) {
    if (endAll(ranks) && !isClosing_) onFailure_(ranks, /*ranksKnow=*/true);
    return Status::ok();
  }
  for (const auto& device : devices()) FARANDOLE_RETURN_IF_ERROR(device->asyncError());
  return Status::ok();
}

bool DeviceGroup::endAll(const Status& why) {
  {
    std::lock_guard lock(mutex_);
    if (!over_) return false;
    over_ = why;
  }
  for (const auto& device : devices()) device->endAll(why);
  return true;
}

void DeviceGroup::fail(const Status& why) {
  if (endAll(why) && !isClosing_) onFailure_(why, /*ranksKnow=*/false);
}

void DeviceGroup::attend() {
  for (const auto& device : devices()) device->tellPeers();
}

void DeviceGroup::abort(const Status& why) { (void)endAll(why); }

void DeviceGroup::close(std::chrono::milliseconds limit) {
  if (!status()) return;
  isClosing_ = true;
  attend();
  const auto deadline = DeviceClock::now() + limit;
  const auto isIdle = [all = devices()] {
    return std::ranges::all_of(all, [](const auto& device) { return device->isIdle(); });
  };
  bool wasIdle = isIdle();
  for (; !wasIdle && status() && DeviceClock::now() < deadline; wasIdle = isIdle()) {
    std::this_thread::sleep_for(kLookAtEnd);
  }
  if (wasIdle) {
    // NCCL waits for what the network still has to do. It is left alone where that takes longer.
    std::packaged_task<void()> closing([all = devices()]() mutable {
      for (const auto& device : all) (void)device->close();
      all.clear();  // nothing is left to this thread once it has told
    });
    auto closed = closing.get_future();
    std::thread(std::move(closing)).detach();
    (void)closed.wait_until(deadline);
  }
  abort(Status::aborted(setup_.name + " was closed"));
}

}  // namespace farandole::transport
