#include "pipeline/passes/queue_messages.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/simulate.h"
#include "pipeline/ir/validate.h"
#include "pipeline/passes/lower.h"
#include "pipeline/schedules/registry.h"
#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/pipeline/ir/random_runner.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

constexpr ChannelModel kModels[] = {ChannelModel::kTagged, ChannelModel::kFifoPerEdge, ChannelModel::kOneQueuePerRank};

Plan computeOnly(Plan plan) {
  for (std::vector<Action>& actions : plan.ranks) {
    std::erase_if(actions, [](const Action& action) { return isPost(action.kind); });
  }
  return plan;
}

// With one queue no message waits for what its rank does later. So over any edges a rank may wait, at any time, for all
// that it has posted.
void checkHostMayWait(const Plan& queued, std::mt19937_64& random) {
  EXPECT_EQ(runRandomly(queued, ChannelModel::kFifoPerEdge, random, Host::kSynchronizes), "");
}

// Both the proof and the oracle, which picks one event after another.
void checkRuns(const Plan& compute, std::mt19937_64& random) {
  const Result<Plan> queued = queueMessages(compute);
  ASSERT_TRUE(queued) << queued.status().toString();
  EXPECT_EQ(computeOnly(*queued), compute) << "the order of compute";
  for (const ChannelModel model : kModels) {
    const Status proof = validate(*queued, model);
    ASSERT_TRUE(proof) << proof.toString();
    EXPECT_EQ(runRandomly(*queued, model, random), "") << toString(model);
  }
  checkHostMayWait(*queued, random);
  const std::vector<StageCost> costs(static_cast<std::size_t>(compute.numStages), {1.5, 2, 1, 0.5});
  EXPECT_DOUBLE_EQ(simulate(*queued, {costs, 0})->makespan, simulate(compute, {costs, 0})->makespan);
}

TEST(QueueMessages, EveryScheduleRunsWithOneQueueForEachRank) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::map<std::string_view, int> counts;
  for (const std::string_view name : scheduleNames()) {
    for (const std::int32_t p : {1, 2, 3, 4, 8}) {
      for (const std::int32_t v : {1, 2, 3}) {
        for (std::int32_t m = 1; m <= 2 * p + 3; ++m) {
          const Result<Plan> plan = makePlan(name, {p, p * v, m, random() % 5 == 0});
          if (!plan) continue;
          SCOPED_TRACE(std::string(name) + " p " + std::to_string(p) + " v " + std::to_string(v) + " m " +
                       std::to_string(m));
          ++counts[name];
          checkRuns(*plan, random);
          const Result<Plan> lowered = lower(*plan, ChannelModel::kOneQueuePerRank);
          ASSERT_TRUE(lowered) << lowered.status().toString();
          checkHostMayWait(*lowered, random);
          ASSERT_FALSE(HasFailure());
        }
      }
    }
  }
  for (const std::string_view name : scheduleNames()) EXPECT_GE(counts[name], 4) << name;
}

// Each rank takes what its stages can do next in any order, so that no schedule's regularity helps.
Plan randomPlan(std::int32_t numRanks, std::int32_t numMicrobatches, std::mt19937_64& random) {
  Plan plan;
  plan.numStages = static_cast<std::int32_t>(numRanks + random() % 5);
  plan.numMicrobatches = numMicrobatches;
  plan.edges = randomEdges(plan.numStages, random);
  plan.ranks.resize(numRanks);
  for (std::int32_t stage = 0; stage < plan.numStages; ++stage) {
    plan.rankOfStage.push_back(stage < numRanks ? stage : static_cast<std::int32_t>(random() % numRanks));
  }
  const auto count = static_cast<std::size_t>(plan.numStages) * numMicrobatches;
  std::vector<char> forwards(count), inputs(count), weights(count);
  const auto at = [&](std::int32_t stage, std::int32_t microbatch) {
    return static_cast<std::size_t>(stage) * numMicrobatches + microbatch;
  };
  const auto all = [&](const std::vector<char>& done, std::int32_t stage, std::int32_t microbatch, bool isInto) {
    for (const StageEdge& edge : *plan.edges) {
      if (isInto && edge.to == stage && done[at(edge.from, microbatch)] == 0) return false;
      if (!isInto && edge.from == stage && done[at(edge.to, microbatch)] == 0) return false;
    }
    return true;
  };
  while (true) {
    std::vector<Action> next;
    for (std::int32_t stage = 0; stage < plan.numStages; ++stage) {
      for (std::int32_t microbatch = 0; microbatch < numMicrobatches; ++microbatch) {
        const std::size_t i = at(stage, microbatch);
        if (forwards[i] == 0) {
          if (all(forwards, stage, microbatch, true)) next.push_back({stage, ActionKind::kForward, microbatch, {}});
        } else if (inputs[i] == 0) {
          const ActionKind kind = stage % 2 == 0 ? ActionKind::kBackwardInput : ActionKind::kBackward;
          if (all(inputs, stage, microbatch, false)) next.push_back({stage, kind, microbatch, {}});
        } else if (weights[i] == 0) {
          next.push_back({stage, ActionKind::kBackwardWeight, microbatch, {}});
        }
      }
    }
    if (next.empty()) return plan;
    const Action& taken = next[random() % next.size()];
    const std::size_t i = at(taken.stage, taken.microbatch);
    if (isForward(taken.kind)) forwards[i] = 1;
    if (isInputBackward(taken.kind)) inputs[i] = 1;
    if (isWeightBackward(taken.kind)) weights[i] = 1;
    plan.ranks[plan.rankOfStage[taken.stage]].push_back(taken);
  }
}

TEST(QueueMessages, SoDoesAnyPlanThatCanRunAtAll) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  int numNeeded = 0;
  for (int i = 0; i < 300; ++i) {
    const auto p = static_cast<std::int32_t>(1 + random() % 5);
    const Plan plan = randomPlan(p, static_cast<std::int32_t>(1 + random() % 5), random);
    SCOPED_TRACE("case " + std::to_string(i) + " edges " + edgesText(*plan.edges));
    checkRuns(plan, random);
    ASSERT_FALSE(HasFailure());
    const Result<Plan> lowered = lower(plan, ChannelModel::kOneQueuePerRank);
    ASSERT_TRUE(lowered) << lowered.status().toString();
    checkHostMayWait(*lowered, random);
    numNeeded += *lowered == *queueMessages(plan) ? 1 : 0;
  }
  EXPECT_GT(numNeeded, 20) << "plans whose messages do not suit one queue where they are used";
}

TEST(QueueMessages, ReceivesThatArePostedAheadBearNoHostThatWaits) {
  std::mt19937_64 random(1);
  const Plan plan = *lower(computePlan("1F1B", 2, 4), ChannelModel::kFifoPerEdge);
  EXPECT_EQ(runRandomly(plan, ChannelModel::kFifoPerEdge, random), "");
  EXPECT_NE(runRandomly(plan, ChannelModel::kFifoPerEdge, random, Host::kSynchronizes).find("is stuck"),
            std::string::npos);
}

TEST(QueueMessages, WhatIsExchangedAtOneTimeIsOneBatch) {
  // Rank 0 computes until 1, 2, 6 (0B0), 7 (0F2), and rank 1 until 2, 4 (1B0), 5, 7 (1B1).
  const Plan plan = *queueMessages(computePlan("1F1B", 2, 3));
  EXPECT_EQ(rankText(plan, 0),
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 (0SEND_F2;0RECV_B1)BATCH_P2P 0B1 0RECV_B2 0B2");
  EXPECT_EQ(rankText(plan, 1),
            "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 (1RECV_F2;1SEND_B1)BATCH_P2P 1F2 1B2 1SEND_B2");
}

TEST(QueueMessages, RefusesWhatCannotRun) {
  const Plan plan = planOf("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n");
  EXPECT_NE(queueMessages(plan).status().toString().find("deadlock: 2 ranks wait"), std::string::npos);
  EXPECT_NE(queueMessages(loweredPlan("1F1B", 2, 2)).status().toString().find("already has communication"),
            std::string::npos);
}

}  // namespace
}  // namespace farandole::pipeline
