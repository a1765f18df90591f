#include "backend/common/faster_way.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <string>

namespace farandole {
namespace {

constexpr std::uint64_t kBytes = 1000;

// One that is told what it costs to go either way; which it takes.
struct Walker {
  std::array<std::uint64_t, 2> costs;
  FasterWay ways = {};

  bool go(double factor = 1) {
    const bool way = ways.next();
    ways.note(way, static_cast<std::uint64_t>(static_cast<double>(costs[way]) * factor), kBytes);
    return way;
  }
  int goMany(int times) {
    int second = 0;
    for (int i = 0; i < times; ++i) second += go() ? 1 : 0;
    return second;
  }
};

constexpr int kRound = FasterWay::kFirstPause + 2 * FasterWay::kTried;  // until the first have been compared

TEST(FasterWay, TheFasterOneIsFoundAndStaysAllButFew) {
  Walker first{{100, 150}};
  EXPECT_EQ(first.goMany(kRound), FasterWay::kTried);
  EXPECT_LT(first.goMany(100'000), 500);
  Walker second{{150, 100}};
  second.goMany(kRound);
  EXPECT_TRUE(second.go());
  EXPECT_GT(second.goMany(100'000), 99'500);
}

TEST(FasterWay, WhatBecomesTheFasterOneIsFoundWithinALongPause) {
  Walker walker{{100, 150}};
  walker.goMany(100'000);
  for (const auto& costs : {std::array<std::uint64_t, 2>{300, 150}, {100, 150}, {100, 50}}) {
    walker.costs = costs;
    walker.goMany(FasterWay::kLongestPause + kRound);
    EXPECT_EQ(walker.go(), costs[1] < costs[0]);
    walker.goMany(10'000);
  }
}

TEST(FasterWay, WhatIsSlowAtFirstBecauseItsMemoryIsNewIsNotLeftForThat) {
  Walker walker{{100, 150}};
  int second = 0;
  for (int i = 0; i < kRound; ++i) second += walker.go(i < static_cast<int>(FasterWay::kFirstPause) ? 2 : 1) ? 1 : 0;
  EXPECT_EQ(second, FasterWay::kTried);
  EXPECT_FALSE(walker.go());
}

TEST(FasterWay, WhatIsFarSlowerIsTriedLessOften) {
  const auto tried = [](std::uint64_t cost) { return Walker{{100, cost}}.goMany(2 * FasterWay::kLongestPause); };
  EXPECT_LT(tried(150), tried(110));
  Walker walker{{100, 150}};
  walker.goMany(kRound);
  EXPECT_EQ(walker.goMany(16 * FasterWay::kFirstPause), 0);
  EXPECT_EQ(walker.goMany(kRound), FasterWay::kTried);
}

TEST(FasterWay, NobodyChangesForLittle) {
  Walker walker{{100, 96}};
  EXPECT_LT(walker.goMany(10'000), 200);
}

TEST(FasterWay, WhatOtherProgramsHoldUpDoesNotCount) {
  std::mt19937_64 random(std::random_device{}());
  Walker walker{{100, 150}};
  int second = 0;
  for (int i = 0; i < 100'000; ++i) second += walker.go(random() % 4 == 0 ? 5 : 1) ? 1 : 0;
  EXPECT_LT(second, 5'000);
}

TEST(FasterWay, WhatIsLargerMayCostMore) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  FasterWay ways;
  int second = 0;
  for (int i = 0; i < 100'000; ++i) {
    const std::uint64_t bytes = kBytes * (100 + random() % 100);
    const bool way = ways.next();
    ways.note(way, bytes * (way ? 120 : 100), bytes);
    second += way ? 1 : 0;
  }
  EXPECT_LT(second, 500);
}

TEST(FasterWay, TheCostOfOneMayBeToldAfterTheNextHasBegun) {
  FasterWay ways;
  bool before = ways.next();
  int second = 0;
  for (int i = 0; i < 10'000; ++i) {
    const bool way = ways.next();
    ways.note(before, before ? 50 : 100, kBytes);
    second += way ? 1 : 0;
    before = way;
  }
  EXPECT_GT(second, 9'900);
}

TEST(FasterWay, WhatWasNeverToldIsNotFaster) {
  FasterWay ways;
  for (int i = 0; i < 100; ++i) {
    if (const bool way = ways.next(); !way) ways.note(way, 100, kBytes);
  }
  EXPECT_FALSE(ways.next());
}

}  // namespace
}  // namespace farandole
