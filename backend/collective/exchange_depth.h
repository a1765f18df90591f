#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>

#include "backend/collective/program.h"

namespace farandole::collective {

// How many chunks are under way at a time, each way, where two hosts exchange much: as many as the way between them
// holds, which the first exchange measures with messages of one byte. More would wait in the kernel, where they leave
// the caches, and are sent at a pace of its own (congestion control BBR).
class ExchangeDepth {
 public:
  // Of an exchange that the program begins with `peer`, a rank of the group; both call it for the same ones, and always
  // for each other. One, until the first of them has measured.
  std::size_t next(Program& program, int peer, std::size_t chunkBytes);

 private:
  using Clock = std::chrono::steady_clock;

  void measure(Program& program, int peer);

  bool isBegun_ = false;  // the measurement
  // While it is under way:
  Clock::time_point began_;
  Clock::duration least_ = Clock::duration::max();
  std::atomic<Clock::duration> delay_{Clock::duration::zero()};  // of one way; zero until it is known
};

}  // namespace farandole::collective
