#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace farandole::testing {

using Lock = std::unique_lock<std::mutex>;
using Clock = std::chrono::steady_clock;

// What all parts of the simulator share: one mutex over everything, whom to wake, and what went wrong. Members are
// guarded by the mutex unless a comment says otherwise.
struct Core {
  Core(int numDevices, std::uint64_t seed);

  int numDevices() const { return static_cast<int>(killed.size()); }
  bool alive(int device) const { return !killed[static_cast<std::size_t>(device)].has_value(); }
  void violation(const std::string& function, const std::string& text);
  // Something was put or ended: the executor and those who wait on the host look again.
  void changed();

  const std::uint64_t serial;  // tells clusters that follow each other apart
  std::mutex mutex;
  std::condition_variable hosts;     // threads blocked in a call
  std::condition_variable executor;  // the thread that runs the streams
  int blocked = 0;                   // how many threads are blocked in a call
  bool ended = false;                // every wait gives up
  std::mt19937_64 random;
  std::vector<std::optional<Clock::time_point>> killed;  // when each device died
  std::vector<std::string> violations;
};

}  // namespace farandole::testing
