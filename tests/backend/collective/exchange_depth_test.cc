#include "backend/collective/exchange_depth.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <random>

#include "tests/backend/collective/communicators.h"
#include "tests/backend/collective/slices.h"
#include "tests/backend/collective/sums.h"

namespace farandole::collective {
namespace {

using testing::Group;
using testing::sliceOf;
using testing::TestOperation;

constexpr Reduction kSum = testing::kSumOf<std::int64_t>;

// On all ranks at once, each with what build(program, rank) makes.
template <typename Build>
void run(const Group& group, std::uint32_t sequence, const Build& build) {
  std::vector<std::shared_ptr<TestOperation>> operations;
  for (int rank = 0; rank < group.size(); ++rank) {
    Program program;
    build(program, rank);
    operations.push_back(TestOperation::launch(group[rank], std::move(program), sequence));
  }
  for (auto& operation : operations) {
    ASSERT_TRUE(operation->wait(transport::Clock::now() + std::chrono::seconds(60)));
    ASSERT_TRUE(operation->status()) << operation->status().toString();
  }
}

TEST(ExchangeDepth, IsWhatTheWayHoldsOnceTheFirstExchangeHasMeasuredIt) {
  const Group group({0, 1}, 0, {});
  ExchangeDepth depths[2];
  run(group, 1, [&](Program& program, int rank) {
    EXPECT_EQ(depths[rank].next(program, 1 - rank, 1), 1) << "nothing is known yet";
    EXPECT_GT(program.numMessages(), 0);
  });
  for (int rank = 0; rank < 2; ++rank) {
    Program program;
    // A message takes more than 100 ns, and less than a second, in which 5 GB pass.
    EXPECT_EQ(depths[rank].next(program, 1 - rank, 1), 16);
    EXPECT_EQ(depths[rank].next(program, 1 - rank, std::size_t{20} << 30), 1);
    EXPECT_EQ(program.numMessages(), 0) << "it is measured once";
  }
}

TEST(ExchangeDepth, LargeAllReducesOfTwoHostsAddUpBeforeItIsKnownAndAfter) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (const std::vector<int>& hosts : {std::vector{0, 1}, std::vector{0, 0, 1}, std::vector{0, 0, 1, 1}}) {
    const Group group(hosts, 0, {});
    for (std::uint32_t round = 1; round <= 6; ++round) {
      const std::size_t count = (1 << 17) * hosts.size() + random() % 300'000;
      std::vector<std::vector<std::int64_t>> data(hosts.size(), std::vector<std::int64_t>(count));
      for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
        std::iota(data[rank].begin(), data[rank].end(), static_cast<std::int64_t>(rank) * round);
      }
      ASSERT_NO_FATAL_FAILURE(run(group, round, [&](Program& program, int rank) {
        allReduce(program, group[rank]->topology(), kSum, sliceOf(data[rank]));
      }));
      const auto ranks = static_cast<std::int64_t>(hosts.size());
      for (const auto& result : data) {
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_EQ(result[i], ranks * static_cast<std::int64_t>(i) + ranks * (ranks - 1) / 2 * round) << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace farandole::collective
