// Every schedule on graphs of stages that are not the chain.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "pipeline/ir/csv.h"
#include "pipeline/ir/simulate.h"
#include "pipeline/ir/validate.h"
#include "pipeline/passes/insert_communication.h"
#include "pipeline/passes/lower.h"
#include "pipeline/passes/prepost_receives.h"
#include "pipeline/schedules/registry.h"
#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/pipeline/ir/random_runner.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

constexpr ChannelModel kModels[] = {ChannelModel::kTagged, ChannelModel::kFifoPerEdge, ChannelModel::kOneQueuePerRank};

// Proves the lowered plan, and lets the oracle run it.
void checkRuns(const Plan& compute, std::mt19937_64& random) {
  const SimulationCosts costs{std::vector<StageCost>(static_cast<std::size_t>(compute.numStages), {1, 2, 1, 1}), 0};
  const Result<SimulationResult> simulated = simulate(compute, costs);
  ASSERT_TRUE(simulated) << simulated.status().toString();
  for (const ChannelModel model : kModels) {
    const Result<Plan> lowered = lower(compute, model);
    ASSERT_TRUE(lowered) << lowered.status().toString();
    EXPECT_EQ(runRandomly(*lowered, model, random), "") << toString(model);
    EXPECT_DOUBLE_EQ(simulate(*lowered, costs)->makespan, simulated->makespan);
    if (model == ChannelModel::kOneQueuePerRank) continue;
    const Plan preposted = prepostReceives(*insertCommunication(compute), static_cast<std::int32_t>(1 + random() % 3));
    const Status proof = validate(preposted, model);
    EXPECT_TRUE(proof) << toString(model) << ": " << proof.toString();
  }
}

ScheduleOptions randomOptions(std::mt19937_64& random) {
  const auto p = static_cast<std::int32_t>(1 + random() % 5);
  const auto v = static_cast<std::int32_t>(1 + random() % 3);
  return {p, p * v, static_cast<std::int32_t>(1 + random() % 12), random() % 5 == 0};
}

ScheduleOptions optionsForCopies(std::mt19937_64& random) {
  const auto p = static_cast<std::int32_t>(2 + 2 * (random() % 2));
  return {p, 2 * p, 2 * p + static_cast<std::int32_t>(2 * (random() % 3)), random() % 5 == 0};
}

TEST(StageGraphs, EveryScheduleRunsOnAnyThatGoesUp) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::map<std::string_view, int> counts;
  for (int i = 0; i < 150; ++i) {
    for (const std::string_view name : scheduleNames()) {
      const bool hasCopies = name == "DualPipe";  // it is told the edges of one of them
      ScheduleOptions options = hasCopies ? optionsForCopies(random) : randomOptions(random);
      const std::int32_t p = options.numRanks;
      const std::int32_t v = options.numStages / p;
      const std::int32_t m = options.numMicrobatches;
      const std::vector<StageEdge> edges = randomEdges(hasCopies ? p : p * v, random);
      SCOPED_TRACE(std::string(name) + " p " + std::to_string(p) + " v " + std::to_string(v) + " m " +
                   std::to_string(m) + " edges " + edgesText(edges));
      const Result<Plan> chain = makePlan(name, options);
      options.edges = edges;
      const Result<Plan> plan = makePlan(name, options);
      ASSERT_EQ(plan.status().isOk(), chain.status().isOk()) << plan.status().toString();
      if (!plan) continue;
      ++counts[name];
      EXPECT_EQ(plan->ranks, chain->ranks) << "the order of compute";
      EXPECT_EQ(plan->edges->size(), edges.size() * (hasCopies ? 2 : 1));
      checkRuns(*plan, random);
      const SimulationCosts costs{std::vector<StageCost>(static_cast<std::size_t>(p) * v, {1, 2, 1, 1}), 0.25};
      // What the chain waits for includes all that edges can ask for.
      EXPECT_LE(simulate(*plan, costs)->makespan, simulate(*chain, costs)->makespan + 1e-9);
      ASSERT_FALSE(HasFailure());
    }
  }
  for (const std::string_view name : scheduleNames()) EXPECT_GT(counts[name], 5) << name;
}

TEST(StageGraphs, AUNetSendsAcrossItsRanks) {
  ScheduleOptions options{2, 4, 1, false};
  options.edges = {{0, 1}, {1, 2}, {2, 3}, {0, 3}};
  const Plan plan = *lower(*makePlan("none", options), ChannelModel::kFifoPerEdge);
  // 0 and 2 are on rank 0: 0 -> 3 goes between the ranks as 0 -> 1 does, and both are received ahead.
  EXPECT_EQ(rankText(plan, 0),
            "0F0 (0SEND_F0;0SEND_F0>3)BATCH_P2P 2RECV_F0 2F0 2SEND_F0 (2RECV_B0;0RECV_B0<3)BATCH_P2P 0RECV_B0 2B0 "
            "2SEND_B0 0B0");
  EXPECT_EQ(rankText(plan, 1),
            "(1RECV_F0;3RECV_F0<0)BATCH_P2P 3RECV_F0 1F0 1SEND_F0 1RECV_B0 3F0 3B0 (3SEND_B0;3SEND_B0>0)BATCH_P2P 1B0 "
            "1SEND_B0");
  options.numRanks = 1;
  EXPECT_EQ(rankText(*lower(*makePlan("none", options)), 0), "0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0");
}

TEST(StageGraphs, StagesWithoutEdgesWaitForNobody) {
  ScheduleOptions options{3, 3, 2, false};
  options.edges.emplace();
  const Plan plan = *lower(*makePlan("GPipe", options));
  EXPECT_EQ(rankText(plan, 2), "2F0 2F1 2B0 2B1");
  EXPECT_DOUBLE_EQ(simulate(plan, {std::vector<StageCost>(3, {1, 2, 0, 0}), 1})->makespan, 6);
}

TEST(StageGraphs, RefusedWhereEdgesGoDownOrOut) {
  const auto error = [](std::vector<StageEdge> edges) {
    ScheduleOptions options{3, 3, 2, false};
    options.edges = std::move(edges);
    return makePlan("1F1B", options).status().toString();
  };
  EXPECT_EQ(error({{0, 2}, {2, 1}}), "schedule 1F1B: edge 2 -> 1; expected edges from lower to higher stages");
  EXPECT_EQ(error({{0, 3}}), "schedule 1F1B: edge 0 -> 3: expected two different stages of 0 to 2");
}

TEST(StageGraphs, AnOrderThatCannotRunIsRefusedWithItsCycle) {
  Plan plan = planOf("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n2F1,2B1,2F0,2B0\n", {0, 1, 2});
  plan.edges = {{0, 1}, {0, 2}};
  EXPECT_TRUE(lower(planOf("0F0,0F1\n1F1,1F0\n2F0,2F1\n"), ChannelModel::kTagged)) << "late, but no cycle";
  const std::string refusal = lower(plan, ChannelModel::kTagged).status().toString();
  EXPECT_NE(refusal.find("deadlock under kTagged:\n  rank "), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("(0RECV_B0<2) needs 2SEND_B0>0 of rank 2"), std::string::npos) << refusal;
}

}  // namespace
}  // namespace farandole::pipeline
