#pragma once

#include <c10/core/Event.h>

#include <chrono>
#include <cstddef>
#include <vector>

namespace farandole::pipeline {

// When a device came to points of its current streams, which the host has left
// long before. Marks are events that are kept and recorded again, so that from
// the second time on nothing is allocated; to set one waits for nothing.
//
// One thread, inside of a guard of the device.
class DeviceTimes {
 public:
  using Clock = std::chrono::steady_clock;

  explicit DeviceTimes(c10::Device device) : device_(device) {}

  // At what the current stream has been given so far; a mark is set again by the same number.
  void mark(std::size_t number);

  // When the device came to the marks up to `count`, all of which are set, on the host's clock: it waits for the
  // device's current stream once. Late by what it takes the host to wake up, all by the same.
  std::vector<Clock::time_point> read(std::size_t count);

 private:
  c10::Stream currentStream() const;

  c10::Device device_;
  std::vector<c10::Event> marks_;
};

}  // namespace farandole::pipeline
