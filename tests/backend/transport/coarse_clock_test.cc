#include "backend/transport/coarse_clock.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace farandole::transport {
namespace {

TEST(CoarseClock, IsHardlyLateAndNotEarlyButWhereATickIsLate) {
  using Clock = std::chrono::steady_clock;
  Clock::duration latest{};
  double early = 1;  // the least of several windows: in the others somebody else may have had the core
  for (int window = 0; window < 10 && early > 0; ++window) {
    int looks = 0;
    int earlyOnes = 0;
    const auto end = Clock::now() + std::chrono::milliseconds(50);
    for (Clock::time_point before = Clock::now(); before < end; before = Clock::now(), ++looks) {
      const Clock::time_point coarse = coarseNow();
      if (coarse < before) ++earlyOnes;
      latest = std::max(latest, coarse - Clock::now());
    }
    early = std::min(early, static_cast<double>(earlyOnes) / looks);
  }
  EXPECT_LE(early, 0.1);
  EXPECT_LE(latest, std::chrono::milliseconds(20));
}

}  // namespace
}  // namespace farandole::transport
