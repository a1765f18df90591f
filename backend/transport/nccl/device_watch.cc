#include "backend/transport/nccl/device_watch.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace farandole::transport {
namespace {

// How late the end of an operation may be noticed by those who do not ask.
constexpr std::chrono::milliseconds kPeriod{20};

struct Watched {
  std::weak_ptr<WatchedGroup> group;
  int device;
  std::weak_ptr<DeviceLane> lane;
};

// What is known of a lane that has something under way; ends the group where that is bad.
void lookAfter(WatchedGroup& group, DeviceLane& lane) {
  if (const Status swept = lane.sweep(); !swept) return group.fail(swept);
  if (lane.isEmpty()) return;
  if (const Status health = group.health(); !health) return group.fail(health);
  if (const auto late = lane.findLate(DeviceClock::now())) {
    group.fail(Status::timeout(late->describe() + ": it did not end within its timeout"));
  }
}

}  // namespace

// Outlives the watch where that ends on its own thread, by the last group that a look at it held.
struct DeviceWatch::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool isOver = false;
  std::atomic<bool> isIdle{false};
  std::vector<Watched> watched;
};

DeviceWatch::DeviceWatch(const CudaApi& cuda) : state_(std::make_shared<State>()) {
  thread_ = std::thread([&cuda, state = state_] { run(cuda, *state); });
}

DeviceWatch::~DeviceWatch() { stop(); }

void DeviceWatch::stop() {
  {
    std::lock_guard lock(state_->mutex);
    state_->isOver = true;
  }
  state_->changed.notify_all();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void DeviceWatch::watch(const std::weak_ptr<WatchedGroup>& group, int device, const std::weak_ptr<DeviceLane>& lane) {
  std::lock_guard lock(state_->mutex);
  std::erase_if(state_->watched, [](const Watched& one) { return one.lane.expired() || one.group.expired(); });
  state_->watched.push_back({group, device, lane});
}

void DeviceWatch::wake() {
  if (!state_->isIdle.load()) return;
  {
    std::lock_guard lock(state_->mutex);
    state_->isIdle = false;
  }
  state_->changed.notify_all();
}

void DeviceWatch::run(const CudaApi& cuda, State& state) {
  std::unique_lock lock(state.mutex);
  while (!state.isOver) {
    // Before the lanes are listed: one that is new then is in the list, or its wake() finds this.
    state.isIdle = true;
    const std::vector<Watched> watched = state.watched;
    lock.unlock();
    bool isIdle = true;
    const WatchedGroup* attended = nullptr;  // most lanes of a group are next to each other
    for (const Watched& one : watched) {
      const auto group = one.group.lock();
      const auto lane = one.lane.lock();
      if (group == nullptr || lane == nullptr) continue;
      if (std::exchange(attended, group.get()) != group.get()) group->attend();
      if (!lane->isEmpty()) {
        // An event is asked with its device as the current one: else device 0 would get a context for that.
        const Status settled = settleOnDevice(cuda, one.device);
        if (settled) {
          lookAfter(*group, *lane);
        } else {
          group->fail(settled);
        }
      }
      isIdle = isIdle && lane->isEmpty();
    }
    lock.lock();
    if (state.isOver) break;
    if (isIdle) {
      // What was added since then has woken it.
      state.changed.wait(lock, [&] { return state.isOver || !state.isIdle; });
    } else {
      state.isIdle = false;
      state.changed.wait_for(lock, kPeriod, [&] { return state.isOver; });
    }
  }
}

}  // namespace farandole::transport
