#include "backend/transport/coarse_clock.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace farandole::transport {
namespace {

TEST(CoarseClock, IsHardlyLateAndNotEarlyButWhereATickIsLate) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::milliseconds(100);
  Clock::duration latest{};
  int looks = 0;
  int early = 0;
  for (Clock::time_point before = Clock::now(); before < end; before = Clock::now(), ++looks) {
    const Clock::time_point coarse = coarseNow();
    if (coarse < before) ++early;
    latest = std::max(latest, coarse - Clock::now());
  }
  EXPECT_LE(early, looks / 10);
  EXPECT_LE(latest, std::chrono::milliseconds(20));
}

}  // namespace
}  // namespace farandole::transport
