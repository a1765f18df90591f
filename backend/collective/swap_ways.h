#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backend/collective/host_segment.h"
#include "backend/common/fastest_way.h"
#include "backend/observe/tick_clock.h"

namespace farandole::collective {

// In the order in which they are tried.
enum class SwapWay : std::uint8_t {
  kReading,   // in the other one's memory, where that is cheap
  kClaiming,  // through the memory that they share, of which who reads claims lines (cache_lines.h)
  kCopying,   // through the same, plainly
};

// How two ranks of a host give each other what they swap. Which way is the fastest one is the machine's, and changes
// while they run, with where their cores are: so the first rank measures, by size, and tells. Both must go one way;
// what was told in one turn counts from the next one on, of which both know what it was. Used in turns that have begun,
// one after another.
class SwapWays {
 public:
  // Of a segment whose ranks have told how they read.
  explicit SwapWays(HostSegment& host);

  SwapWay inTurn(HostTurn turn, std::size_t bytes);
  // Whether what comes after inTurn(), up to end(), is measured.
  bool measures() const { return measures_; }
  // While it waits for the other rank to come.
  void pause() { paused_ = clock_.now(); }
  void resume() { started_ += clock_.now() - paused_; }
  void end();

 private:
  static constexpr std::size_t kSizes = 10;  // from kSmallestRead on, each twice the one before

  HostSegment& host_;
  observe::TickClock clock_;
  const unsigned firstWay_;
  std::array<FastestWay, kSizes> ways_;
  std::uint16_t told_ = 0;  // what comes next of each size: the digits of a number to the base of kMostWays
  // Of what is measured:
  bool measures_ = false;
  std::size_t size_ = 0;
  std::size_t bytes_ = 0;
  unsigned way_ = 0;
  observe::TickClock::Ticks started_ = 0;
  observe::TickClock::Ticks paused_ = 0;
};

}  // namespace farandole::collective
