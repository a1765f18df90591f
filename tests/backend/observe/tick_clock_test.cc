#include "backend/observe/tick_clock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace farandole::observe {
namespace {

using namespace std::chrono_literals;

std::int64_t wallNow() { return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count(); }

TEST(TickClockTest, TicksOfThePastBecomeTheTimeOfDayAtWhichTheyWereRead) {
  const TickClock clock;
  std::this_thread::sleep_for(20ms);
  const std::int64_t before = wallNow();
  const auto ticks = clock.now();
  const std::int64_t after = wallNow();
  std::this_thread::sleep_for(20ms);
  const TickClock::Converter convert(clock);
  constexpr std::int64_t kTolerance = 1'000'000;  // a thread may lose its core between two clocks
  EXPECT_GE(convert(ticks), before - kTolerance);
  EXPECT_LE(convert(ticks), after + kTolerance);
}

TEST(TickClockTest, DistancesAreInNanoseconds) {
  const TickClock clock;
  using Clock = std::chrono::steady_clock;
  const auto beforeFirst = Clock::now();
  const auto first = clock.now();
  const auto afterFirst = Clock::now();
  std::this_thread::sleep_for(50ms);
  const auto beforeSecond = Clock::now();
  const auto second = clock.now();
  const auto afterSecond = Clock::now();
  const TickClock::Converter convert(clock);
  const std::chrono::nanoseconds distance(convert(second) - convert(first));
  EXPECT_GE(distance, beforeSecond - afterFirst - 1ms);
  EXPECT_LE(distance, afterSecond - beforeFirst + 1ms);
}

}  // namespace
}  // namespace farandole::observe
