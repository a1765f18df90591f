#include "backend/transport/nccl/device_lane.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

namespace farandole::transport {

void DeviceLane::add(std::shared_ptr<DeviceOperation> operation) {
  {
    std::lock_guard lock(mutex_);
    if (over_) {
      operations_.push_back(std::move(operation));
      return;
    }
  }
  operation->finish(over_);
}

void DeviceLane::remove(const DeviceOperation& operation) {
  std::lock_guard lock(mutex_);
  std::erase_if(operations_, [&](const auto& one) { return one.get() == &operation; });
}

Status DeviceLane::sweep() {
  while (true) {
    std::shared_ptr<DeviceOperation> first;
    {
      std::lock_guard lock(mutex_);
      if (operations_.empty()) return Status::ok();
      first = operations_.front();
    }
    const auto run = first->hasRun();
    if (!run) return run.status().wrap(first->describe());
    if (!*run) return Status::ok();
    {
      std::lock_guard lock(mutex_);
      // Whoever ended all has it.
      if (operations_.empty() || operations_.front() != first) return Status::ok();
      operations_.pop_front();
    }
    first->finish(Status::ok());
  }
}

std::shared_ptr<DeviceOperation> DeviceLane::findLate(DeviceClock::time_point now) {
  std::vector<std::shared_ptr<DeviceOperation>> due;
  {
    std::lock_guard lock(mutex_);
    std::ranges::copy_if(operations_, std::back_inserter(due),
                         [&](const auto& operation) { return operation->deadline() <= now; });
  }
  // One that has ended may be behind one on another stream that has not. CUDA is not asked with the lock held.
  const auto late = std::ranges::find_if(due, [](const auto& operation) { return !operation->isDone(); });
  return late == due.end() ? nullptr : *late;
}

bool DeviceLane::isEmpty() {
  std::lock_guard lock(mutex_);
  return operations_.empty();
}

Status DeviceLane::over() {
  std::lock_guard lock(mutex_);
  return over_;
}

void DeviceLane::doom(const Status& status) {
  std::lock_guard lock(mutex_);
  if (over_) over_ = status;
  for (const auto& operation : operations_) operation->doom();
}

void DeviceLane::endAll(const Status& status) {
  std::deque<std::shared_ptr<DeviceOperation>> ended;
  {
    std::lock_guard lock(mutex_);
    if (over_) over_ = status;
    ended.swap(operations_);
  }
  for (const auto& operation : ended) operation->finish(status);
}

}  // namespace farandole::transport
