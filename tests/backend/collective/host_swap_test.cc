#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "backend/collective/swap_ways.h"
#include "tests/backend/collective/communicators.h"
#include "tests/backend/collective/slices.h"
#include "tests/backend/collective/sums.h"

namespace farandole::collective {
namespace {

using namespace std::chrono_literals;
using testing::Group;
using testing::sliceOf;
using testing::slicesOf;
using testing::TestOperation;
using Data = std::vector<std::byte>;

// What two ranks give each other, of which the longer one has so many bytes.
struct Swap {
  bool isAllGather;
  std::vector<Data> given[2];
  std::vector<Data> taken[2];

  Swap(std::mt19937_64& random, std::size_t longest) : isAllGather(random() % 2 == 0) {
    const std::size_t other = random() % 2 == 0 ? longest : random() % longest;
    for (int rank = 0; rank < 2; ++rank) {
      for (int to = 0; to < 2; ++to) {
        Data& data = given[rank].emplace_back(rank == to ? longest / 2 : rank == 0 ? longest : other);
        std::ranges::generate(data, [&] { return static_cast<std::byte>(random()); });
      }
      if (isAllGather) given[rank].erase(given[rank].begin() + rank);
    }
    for (int rank = 0; rank < 2; ++rank) {
      for (int from = 0; from < 2; ++from) taken[rank].emplace_back(expected(rank, from).size());
    }
  }

  const Data& expected(int rank, int from) const { return given[from][isAllGather ? 0 : rank]; }
  void build(Program& program, const Topology& t) {
    if (isAllGather) return allGather(program, t, sliceOf(given[t.rank][0]), slicesOf(taken[t.rank]));
    allToAll(program, t, slicesOf(taken[t.rank]), slicesOf(given[t.rank]));
  }
  bool hasArrived() const {
    for (int rank = 0; rank < 2; ++rank) {
      for (int from = 0; from < 2; ++from) {
        if (taken[rank][from] != expected(rank, from)) return false;
      }
    }
    return true;
  }
};

// Runs them at once, up to three in one program, so that slots, windows and counters are used again.
void run(const Group& group, std::mt19937_64& random, std::vector<Swap>& swaps) {
  std::vector<std::shared_ptr<TestOperation>> operations;
  for (std::size_t i = 0; i < swaps.size();) {
    const std::size_t end = std::min(i + 1 + random() % 3, swaps.size());
    for (int rank = 0; rank < 2; ++rank) {
      Program program;
      for (std::size_t j = i; j < end; ++j) swaps[j].build(program, group[rank]->topology());
      operations.push_back(TestOperation::launch(group[rank], std::move(program), static_cast<std::uint32_t>(i)));
    }
    i = end;
  }
  for (auto& operation : operations) {
    ASSERT_TRUE(operation->wait(transport::Clock::now() + 60s));
    ASSERT_TRUE(operation->status()) << operation->status().toString();
  }
  for (const Swap& swap : swaps) ASSERT_TRUE(swap.hasArrived());
}

class HostSwapTest : public ::testing::TestWithParam<std::size_t> {
 protected:
  bool reads() const { return GetParam() == Group::kReading; }
};

TEST_P(HostSwapTest, WhatGoesEachWayInTurnsArrives) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  Group group(2, GetParam());
  constexpr std::size_t kSizes[] = {32 << 10, 64 << 10, 65'537, 200'001, 1'000'000};
  for (int round = 0; round < 12; ++round) {
    std::vector<Swap> swaps;
    swaps.reserve(20);
    for (int i = 0; i < 20; ++i) swaps.emplace_back(random, kSizes[random() % std::size(kSizes)]);
    ASSERT_NO_FATAL_FAILURE(run(group, random, swaps));
  }
}

// Its results pass through the windows, too.
TEST_P(HostSwapTest, AnAllReduceHasItsResultsThoughASwapFollowsAtOnce) {
  std::mt19937_64 random(1);
  Group group(2, GetParam());
  for (int round = 0; round < 200; ++round) {
    const std::size_t bytes = 40'000 + random() % 400'000;
    std::vector<Data> data(2, Data(bytes, std::byte{3}));
    std::vector<Swap> swaps;
    swaps.emplace_back(random, 100'000 + random() % 400'000);
    std::vector<std::shared_ptr<TestOperation>> operations;
    for (int rank = 0; rank < 2; ++rank) {
      Program program;
      allReduce(program, group[rank]->topology(), testing::kSumOf<std::uint8_t>, sliceOf(data[rank]));
      swaps[0].build(program, group[rank]->topology());
      operations.push_back(TestOperation::launch(group[rank], std::move(program), static_cast<std::uint32_t>(round)));
    }
    for (auto& operation : operations) ASSERT_TRUE(operation->wait(transport::Clock::now() + 60s));
    ASSERT_TRUE(swaps[0].hasArrived());
    for (const Data& one : data) ASSERT_EQ(one, Data(bytes, std::byte{6})) << round;
  }
}

TEST_P(HostSwapTest, TheOtherWaysAreTriedAfterAPause) {
  std::mt19937_64 random(1);
  Group group(2, GetParam());
  std::vector<int> told;  // by swap, what came next
  const unsigned others = reads() ? 2 : 1;
  for (unsigned i = 0; i < FastestWay::kFirstPause + others * FastestWay::kTried; ++i) {
    std::vector<Swap> swaps;
    swaps.emplace_back(random, 100'000);
    run(group, random, swaps);
    const auto toldTo = [&](int rank) { return group[rank]->topology().segment->toldBefore({1 << 30, 0}); };
    told.push_back(toldTo(0));
    EXPECT_EQ(toldTo(1), told.back());
  }
  std::vector<int> expected(FastestWay::kFirstPause, 0);
  for (unsigned way = 1; way <= others; ++way) {
    const int first = told[FastestWay::kFirstPause];
    expected.insert(expected.end(), FastestWay::kTried, static_cast<int>(way) * first);
  }
  EXPECT_GT(told.back(), 0);
  EXPECT_EQ(told, expected);
}

INSTANTIATE_TEST_SUITE_P(Every, HostSwapTest, ::testing::Values(Group::kReading, Group::kUnreadable),
                         [](const auto& info) { return info.param == Group::kReading ? "Read" : "Unread"; });

TEST(HostSwap, WhatIsToldInATurnCountsFromTheNextOneOn) {
  auto memory = HostSegment::create(2, HostSegment::kSmallestWindow).value();
  HostSegment first(std::move(memory), 0, 2);
  EXPECT_EQ(first.toldBefore({0, 0}), 0);
  first.tellForLater({0, 0}, 7);
  EXPECT_EQ(first.toldBefore({0, 0}), 0);
  EXPECT_EQ(first.toldBefore({1, 1}), 7);
  first.tellForLater({4, 0}, 0xffff);
  EXPECT_EQ(first.toldBefore({4, 0}), 7) << "the other rank may still be in it";
  EXPECT_EQ(first.toldBefore({5, 0}), 0xffff);
  first.tellForLater({9, 0}, 0);
  EXPECT_EQ(first.toldBefore({9, 0}), 0xffff);
  EXPECT_EQ(first.toldBefore({10, 0}), 0);
}

}  // namespace
}  // namespace farandole::collective
