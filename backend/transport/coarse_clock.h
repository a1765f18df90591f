#pragma once

#include <chrono>
#include <ctime>

namespace farandole::transport {

// A look at steady_clock that is up to two ticks of the kernel late (of 1 to 10 ms), or early where a tick itself comes
// later than that: 3 ns where steady_clock::now() takes 20. For deadlines, of which every message has one and next to
// none is met.
inline std::chrono::steady_clock::time_point coarseNow() {
  const auto timeOf = [](const timespec& time) {
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  };
  static const std::chrono::nanoseconds tick = [&] {
    timespec resolution{};
    clock_getres(CLOCK_MONOTONIC_COARSE, &resolution);
    return timeOf(resolution);
  }();
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);  // the last tick's
  return std::chrono::steady_clock::time_point(timeOf(now) + 2 * tick);
}

}  // namespace farandole::transport
