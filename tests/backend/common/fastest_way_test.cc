#include "backend/common/fastest_way.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>

namespace farandole {
namespace {

constexpr std::uint64_t kBytes = 1000;

// One that is told what it costs to go either way; which it takes.
struct Walker {
  std::array<std::uint64_t, 2> costs;
  FastestWay ways{};

  bool go(double factor = 1) {
    const unsigned way = ways.next();
    ways.note(way, static_cast<std::uint64_t>(static_cast<double>(costs[way]) * factor), kBytes);
    return way == 1;
  }
  int goMany(int times) {
    int second = 0;
    for (int i = 0; i < times; ++i) second += go() ? 1 : 0;
    return second;
  }
};

constexpr int kRound = FastestWay::kFirstPause + 2 * FastestWay::kTried;  // until the first have been compared

TEST(FastestWay, TheFasterOneIsFoundAndStaysAllButFew) {
  Walker first{{100, 150}};
  EXPECT_EQ(first.goMany(kRound), FastestWay::kTried);
  EXPECT_LT(first.goMany(100'000), 600);
  Walker second{{150, 100}};
  second.goMany(kRound);
  EXPECT_TRUE(second.go());
  EXPECT_GT(second.goMany(100'000), 99'400);
}

TEST(FastestWay, WhatBecomesTheFasterOneIsFoundWithinALongPause) {
  Walker walker{{100, 150}};
  walker.goMany(100'000);
  for (const auto& costs : {std::array<std::uint64_t, 2>{300, 150}, {100, 150}, {100, 50}}) {
    walker.costs = costs;
    walker.goMany(FastestWay::kLongestPause + kRound);
    EXPECT_EQ(walker.go(), costs[1] < costs[0]);
    walker.goMany(10'000);
  }
}

TEST(FastestWay, WhatIsSlowAtFirstBecauseItsMemoryIsNewIsNotLeftForThat) {
  Walker walker{{100, 150}};
  int second = 0;
  for (int i = 0; i < kRound; ++i) second += walker.go(i < static_cast<int>(FastestWay::kFirstPause) ? 2 : 1) ? 1 : 0;
  EXPECT_EQ(second, FastestWay::kTried);
  EXPECT_FALSE(walker.go());
}

TEST(FastestWay, WhatIsFarSlowerIsTriedLessOften) {
  const auto tried = [](std::uint64_t cost) { return Walker{{100, cost}}.goMany(2 * FastestWay::kLongestPause); };
  EXPECT_LT(tried(150), tried(110));
  Walker walker{{100, 150}};
  walker.goMany(kRound);
  EXPECT_EQ(walker.goMany(16 * FastestWay::kFirstPause), 0);
  EXPECT_EQ(walker.goMany(kRound), FastestWay::kTried);
}

TEST(FastestWay, NobodyChangesForLittle) {
  Walker walker{{100, 96}};
  EXPECT_LT(walker.goMany(10'000), 200);
}

TEST(FastestWay, WhatOtherProgramsHoldUpDoesNotCount) {
  std::mt19937_64 random(std::random_device{}());
  Walker walker{{100, 150}};
  int second = 0;
  for (int i = 0; i < 100'000; ++i) second += walker.go(random() % 4 == 0 ? 5 : 1) ? 1 : 0;
  EXPECT_LT(second, 5'000);
}

TEST(FastestWay, WhatIsLargerMayCostMore) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  FastestWay ways;
  int second = 0;
  for (int i = 0; i < 100'000; ++i) {
    const std::uint64_t bytes = kBytes * (100 + random() % 100);
    const unsigned way = ways.next();
    ways.note(way, bytes * (way == 1 ? 120 : 100), bytes);
    second += static_cast<int>(way);
  }
  EXPECT_LT(second, 600);
}

TEST(FastestWay, TheCostOfOneMayBeToldAfterTheNextHasBegun) {
  FastestWay ways;
  unsigned before = ways.next();
  int second = 0;
  for (int i = 0; i < 10'000; ++i) {
    const unsigned way = ways.next();
    ways.note(before, before == 1 ? 50 : 100, kBytes);
    second += static_cast<int>(way);
    before = way;
  }
  EXPECT_GT(second, 9'900);
}

TEST(FastestWay, WhatWasNeverToldIsNotFaster) {
  FastestWay ways;
  for (int i = 0; i < 100; ++i) {
    if (ways.next() == 0) ways.note(0, 100, kBytes);
  }
  EXPECT_EQ(ways.next(), 0);
}

TEST(FastestWay, OfThreeTheFastestIsFoundWhicheverItIs) {
  std::array<std::uint64_t, 3> costs = {100, 120, 140};
  do {
    FastestWay ways(3);
    std::array<int, 3> taken = {};
    for (int i = 0; i < 100'000; ++i) {
      const unsigned way = ways.next();
      ways.note(way, costs[way], kBytes);
      ++taken[way];
    }
    const auto fastest = std::ranges::min_element(costs) - costs.begin();
    EXPECT_GT(taken[fastest], 98'500) << costs[0] << " " << costs[1] << " " << costs[2];
    EXPECT_GT(std::ranges::min(taken), 0);
  } while (std::ranges::next_permutation(costs).found);
}

// Two places are used in turn, and what costs little in those that another way has left is not cheap for long.
TEST(FastestWay, WhatAnotherWayHasLeftIsNotForIt) {
  FastestWay ways;
  std::array<unsigned, 2> left = {};
  int second = 0;
  for (unsigned i = 0; i < 100'000; ++i) {
    const unsigned way = ways.next();
    unsigned& place = left[i % 2];
    ways.note(way, way == 0 ? 100 : place == 0 ? 50 : 110, kBytes);
    place = way;
    second += static_cast<int>(way);
  }
  EXPECT_LT(second, 1'500);
}

TEST(FastestWay, OnlyWhatIsTriedNeedsToBeTold) {
  FastestWay ways(3);
  int last = 0;
  int told = 0;
  for (int i = 0; i < 100'000; ++i) {
    const unsigned way = ways.next();
    last += way == 2 ? 1 : 0;
    if (!ways.isTrying()) continue;
    ways.note(way, 100 - 20 * way, kBytes);
    ++told;
  }
  EXPECT_GT(last, 98'500);
  EXPECT_LT(told, 2'000);
}

}  // namespace
}  // namespace farandole
