#include "pipeline/passes/lower.h"

#include <gtest/gtest.h>

#include <random>

#include "pipeline/ir/simulate.h"
#include "pipeline/passes/fuse_batches.h"
#include "pipeline/passes/insert_communication.h"
#include "pipeline/schedules/registry.h"
#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

TEST(Lower, InsertsFusesAndProves) {
  const Plan compute = computePlan("1F1B", 4, 6);
  const Result<Plan> lowered = lower(compute);
  ASSERT_TRUE(lowered) << lowered.status().toString();
  EXPECT_EQ(*lowered, fuseBatches(*insertCommunication(compute)));
}

// Random F, I and W of each stage, 1 to 3 seconds.
SimulationCosts randomCosts(std::int32_t numStages, double transfer, std::mt19937_64& random) {
  SimulationCosts costs;
  costs.transfer = transfer;
  const auto some = [&] { return 1 + static_cast<double>(random() % 201) / 100; };
  for (std::int32_t stage = 0; stage < numStages; ++stage) {
    const double input = some();
    const double weight = some();
    costs.stages.push_back({some(), input + weight, input, weight});
  }
  return costs;
}

TEST(Lower, PostsReceivesSoFarAheadThatNothingWaitsForThem) {
  const std::uint64_t seed = testing::someSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  bool isLateWithoutDepth = false;
  for (const std::string_view name : scheduleNames()) {
    for (int i = 0; i < 20; ++i) {
      const auto p = static_cast<std::int32_t>(2 + random() % 4);
      const auto v = static_cast<std::int32_t>(1 + random() % 3);
      const Result<Plan> plan = makePlan(name, {p, p * v, static_cast<std::int32_t>(p + random() % 20), false});
      if (!plan) continue;
      // No longer than the shortest action.
      const SimulationCosts costs = randomCosts(plan->numStages, static_cast<double>(random() % 101) / 100, random);
      const double open = simulate(*plan, costs)->makespan;
      for (const ChannelModel model : {ChannelModel::kTagged, ChannelModel::kFifoPerEdge}) {
        const Result<Plan> lowered = lower(*plan, model);
        ASSERT_TRUE(lowered) << name << ": " << lowered.status().toString();
        // Rank 0 of DualPipe may need a message, from the other copy, right after the first forward.
        const double late = name == "DualPipe" ? costs.transfer.other : 0;
        const double makespan = simulate(*lowered, costs)->makespan;
        EXPECT_GE(makespan, open - 1e-9) << name << " p " << p << " v " << v;
        EXPECT_LE(makespan, open + late + 1e-9) << name << " p " << p << " v " << v;
      }
      const Plan late = *insertCommunication(*plan);
      isLateWithoutDepth = isLateWithoutDepth || simulate(late, costs)->makespan > open + 1e-6;
    }
  }
  EXPECT_TRUE(isLateWithoutDepth) << "else there is nothing to see here";
}

TEST(Lower, PostsReceivesBesideTheirUseWhereARankHasOneQueue) {
  EXPECT_EQ(rankText(*lower(computePlan("GPipe", 2, 2)), 1), "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1");
  EXPECT_EQ(rankText(*lower(computePlan("GPipe", 2, 2), ChannelModel::kTagged), 1),
            "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1");
}

TEST(Lower, TakesEveryScheduleOfTorchToATaggedTransport) {
  for (std::string name : goldenPlansWithMessages()) {
    name.replace(name.find("_comms"), 6, "");
    const Result<Plan> lowered = lower(planOf(readGolden(name)), ChannelModel::kTagged);
    EXPECT_TRUE(lowered) << name << ": " << lowered.status().toString();
  }
}

TEST(Lower, RefusesRanksThatWaitForEachOther) {
  const Result<Plan> lowered = lower(planOf("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"));
  ASSERT_FALSE(lowered);
  const std::string refusal = lowered.status().toString();
  EXPECT_EQ(refusal.find("the lowered plan cannot run: deadlock under kOneQueuePerRank:\n  rank"), 0u) << refusal;
}

}  // namespace
}  // namespace farandole::pipeline
