#include "pipeline/ir/transfer_times.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "pipeline/ir/simulate.h"
#include "pipeline/ir/timed_messages.h"
#include "pipeline/passes/lower.h"
#include "pipeline/schedules/auto_plan.h"
#include "pipeline/schedules/registry.h"
#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

SimulationCosts costsWith(std::int32_t numStages, TransferTimes transfer) {
  return {std::vector<StageCost>(static_cast<std::size_t>(numStages), {1, 2, 1, 1}), std::move(transfer)};
}

TEST(TransferTimes, AreThoseOfTheEdgeAndDirectionOrElseTheSameForAll) {
  const TransferTimes times(0.5, {{{0, 1}, 1, 2}, {{0, 3}, 4, 0}});
  EXPECT_EQ(times.of({0, 1}, false), 1);
  EXPECT_EQ(times.of({0, 1}, true), 2);
  EXPECT_EQ(times.of({0, 3}, true), 0);
  EXPECT_EQ(times.of({0, 2}, false), 0.5);
  EXPECT_FALSE(times.areZero());
  EXPECT_FALSE(TransferTimes(0, {{{0, 1}, 0, 1}}).areZero());
  EXPECT_TRUE(TransferTimes(0, {{{0, 1}, 0, 0}}).areZero());
}

TEST(TransferTimes, OfEachEdgeCountInASimulatedStep) {
  // One microbatch goes down and comes back: all that it waits for adds up.
  const Plan plan = computePlan("GPipe", 3, 1);
  const TransferTimes times(100, {{{0, 1}, 0.25, 0.5}, {{1, 2}, 3, 7}});
  const double expected = 3 * (1 + 2) + 0.25 + 0.5 + 3 + 7;
  EXPECT_DOUBLE_EQ(simulate(plan, costsWith(3, times))->makespan, expected);
  EXPECT_DOUBLE_EQ(simulate(*lower(plan), costsWith(3, times))->makespan, expected);
}

TEST(TransferTimes, ThatAreTheSameForAllAreAsOneNumber) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (const std::string_view name : {"1F1B", "ZB-H1", "ZBV", "Interleaved1F1B"}) {
    const auto p = static_cast<std::int32_t>(2 + random() % 3);
    const std::int32_t numStages = name == "ZBV" || name == "Interleaved1F1B" ? 2 * p : p;
    const Plan plan = *lower(*makePlan(name, {p, numStages, 5, false}));
    const double all = static_cast<double>(random() % 100) / 50;
    std::vector<EdgeTransfer> edges;
    for (std::int32_t stage = 0; stage + 1 < numStages; ++stage) edges.push_back({{stage, stage + 1}, all, all});
    const auto named = simulate(plan, costsWith(numStages, {99, edges}));
    const auto one = simulate(plan, costsWith(numStages, all));
    EXPECT_DOUBLE_EQ(named->makespan, one->makespan) << name;
    const auto messages = timedMessages(*named);
    const auto expected = timedMessages(*one);
    ASSERT_EQ(messages.size(), expected.size());
    for (std::size_t i = 0; i < messages.size(); ++i) EXPECT_DOUBLE_EQ(messages[i].arrived, expected[i].arrived);
  }
}

TEST(TransferTimes, OfOneDirectionMoveTheArrivalsOfItsMessagesOnly) {
  const Plan plan = *lower(computePlan("1F1B", 2, 2));
  for (const TimedMessage& message : timedMessages(*simulate(plan, costsWith(2, {0, {{{0, 1}, 0.125, 0.5}}})))) {
    const double underWay = message.receive.kind == ActionKind::kRecvB ? 0.5 : 0.125;
    EXPECT_GE(message.arrived - message.sent, underWay);
    EXPECT_EQ(std::fmod(message.arrived - underWay, 0.125), 0);
  }
}

TEST(TransferTimes, ThatAreNoneAreRefusedByName) {
  const Plan plan = computePlan("GPipe", 3, 1);
  const auto refusal = [&](TransferTimes times) {
    return simulate(plan, costsWith(3, std::move(times))).status().toString();
  };
  EXPECT_EQ(refusal(-1), "transfer is -1.000000 seconds; expected a finite number, at least 0");
  EXPECT_EQ(refusal({0, {{{0, 1}, 1, std::numeric_limits<double>::infinity()}}}),
            "transfer over edge 0 -> 1 is inf seconds; expected a finite number, at least 0");
  EXPECT_EQ(refusal({0, {{{1, 2}, 1, 1}, {{0, 1}, 1, 1}}}),
            "transfer over edge 0 -> 1 is not in its place; expected edges ascending, each once");
}

TEST(TransferTimes, AreNamedInTheReasonForAPlanAndDecideIt) {
  const ScheduleOptions options{2, 2, 8, false};
  MeasuredCosts costs{costsWith(2, 0), std::vector<StageMemory>(2, {1, 0.5}), 1e9};
  const auto at0 = makeAutoPlan(options, costs);
  EXPECT_EQ(at0->reason.find("messages"), std::string::npos) << at0->reason;
  costs.times.transfer = {0, {{{0, 1}, 0.002, 2.5}}};
  const auto slow = makeAutoPlan(options, costs);
  EXPECT_NE(slow->reason.find(" where messages take 2 to 2.5e+03 ms"), std::string::npos) << slow->reason;
  EXPECT_NE(slow->plan, at0->plan);
  EXPECT_LT(slow->chosen.makespan, simulate(*lower(at0->plan), costs.times)->makespan);
}

}  // namespace
}  // namespace farandole::pipeline
