#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backend/collective/host_segment.h"
#include "backend/common/faster_way.h"
#include "backend/observe/tick_clock.h"

namespace farandole::collective {

// How two ranks of a host give each other what they swap: each reads it in the other one's memory, or it passes through
// the memory that they share. Which is faster changes while they run, with where their cores are: so the first rank
// measures, by size, and tells. Both must go one way; what was told in one turn counts from the next one on, of which
// both know what it was. Used in turns that have begun, one after another.
class SwapWays {
 public:
  explicit SwapWays(HostSegment& host) : host_(host) {}

  // Whether to pass it in this turn. What comes after it, up to end(), is measured.
  bool passes(HostTurn turn, std::size_t bytes);
  bool measures() const { return host_.index() == 0; }
  // While it waits for the other rank to come.
  void pause() { paused_ = clock_.now(); }
  void resume() { started_ += clock_.now() - paused_; }
  void end();

 private:
  static constexpr std::size_t kSizes = 16;  // from kSmallestRead on, each twice the one before

  HostSegment& host_;
  observe::TickClock clock_;
  std::array<FasterWay, kSizes> ways_;
  std::uint16_t told_ = 0;  // by size, a bit: what comes next passes
  // Of what is measured:
  std::size_t size_ = 0;
  std::size_t bytes_ = 0;
  bool passes_ = false;
  observe::TickClock::Ticks started_ = 0;
  observe::TickClock::Ticks paused_ = 0;
};

}  // namespace farandole::collective
