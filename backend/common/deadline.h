#pragma once

#include <chrono>

namespace farandole {

// `timeout` after `from`; the end of time where it is too long for the clock, as a timedelta of a thousand years is.
inline std::chrono::steady_clock::time_point deadlineAfter(std::chrono::steady_clock::time_point from,
                                                           std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365 * 200);  // of the clock's 292 years
  return timeout < kLongest ? from + timeout : std::chrono::steady_clock::time_point::max();
}

inline std::chrono::steady_clock::time_point deadlineIn(std::chrono::milliseconds timeout) {
  return deadlineAfter(std::chrono::steady_clock::now(), timeout);
}

}  // namespace farandole
