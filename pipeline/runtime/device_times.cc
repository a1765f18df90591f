#include "pipeline/runtime/device_times.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace farandole::pipeline {
namespace {

c10::Event timedEvent(c10::Device device) { return {device.type(), c10::EventFlag::BACKEND_DEFAULT}; }

}  // namespace

void DeviceTimes::mark(std::size_t number) {
  while (marks_.size() <= number) marks_.push_back(timedEvent(device_));
  marks_[number].record(currentStream());
}

std::vector<DeviceTimes::Clock::time_point> DeviceTimes::read(std::size_t count) {
  std::vector<Clock::time_point> times;
  times.reserve(count);
  if (count == 0) return times;
  for (std::size_t i = 0; i < count; ++i) marks_[i].synchronize();  // on whatever streams they are
  c10::Event now = timedEvent(device_);
  now.record(currentStream());
  now.synchronize();
  const Clock::time_point onHost = Clock::now();
  for (std::size_t i = 0; i < count; ++i) {
    const std::chrono::duration<double, std::milli> since(marks_[i].elapsedTime(now));
    times.push_back(onHost - std::chrono::duration_cast<Clock::duration>(since));
  }
  return times;
}

c10::Stream DeviceTimes::currentStream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

}  // namespace farandole::pipeline
