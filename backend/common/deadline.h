#pragma once

#include <chrono>

namespace farandole {

// `timeout` after `from`; the end of time where it is too long for the clock, as a timedelta of a thousand years is.
inline std::chrono::steady_clock::time_point deadlineAfter(std::chrono::steady_clock::time_point from,
                                                           std::chrono::milliseconds timeout) {
  constexpr auto kEnd = std::chrono::steady_clock::time_point::max();
  return timeout < std::chrono::floor<std::chrono::milliseconds>(kEnd - from) ? from + timeout : kEnd;
}

inline std::chrono::steady_clock::time_point deadlineIn(std::chrono::milliseconds timeout) {
  return deadlineAfter(std::chrono::steady_clock::now(), timeout);
}

}  // namespace farandole
