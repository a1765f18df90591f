#include "pipeline/ir/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "pipeline/ir/text.h"
#include "pipeline/passes/insert_communication.h"
#include "pipeline/passes/prepost_receives.h"
#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

constexpr double kForward = 1.0;
constexpr double kBackward = 2.5;

SimulationCosts evenCosts(std::int32_t numStages, double transfer = 0) {
  return {std::vector<StageCost>(static_cast<std::size_t>(numStages), {kForward, kBackward, 1.25, 1.25}), transfer};
}

SimulationResult simulated(const Plan& plan, const SimulationCosts& costs) {
  Result<SimulationResult> result = simulate(plan, costs);
  if (result) return std::move(result).value();
  ADD_FAILURE() << result.status().toString();
  return {};
}

TEST(Simulate, GPipeAnd1F1BTakeMPlusPMinus1SlotsWhetherLoweredOrNot) {
  for (std::string_view name : {"GPipe", "1F1B"}) {
    for (std::int32_t p : {1, 2, 3, 4, 8}) {
      for (std::int32_t m = 1; m <= 3 * p; ++m) {
        for (const Plan& plan : {computePlan(name, p, m), loweredPlan(name, p, m)}) {
          const SimulationResult result = simulated(plan, evenCosts(p));
          ASSERT_DOUBLE_EQ(result.makespan, (m + p - 1) * (kForward + kBackward)) << name << " p " << p << " m " << m;
          ASSERT_NEAR(result.bubble(), static_cast<double>(p - 1) / (m + p - 1), 1e-12);
        }
      }
    }
  }
}

TEST(Simulate, PeakLiveActivationsAreMForGPipeAndMinOfMAndPMinusSFor1F1B) {
  for (std::int32_t p : {1, 2, 4, 8}) {
    for (std::int32_t m : {1, 3, 4, 8, 17}) {
      const SimulationResult gpipe = simulated(loweredPlan("GPipe", p, m), evenCosts(p));
      const SimulationResult oneFOneB = simulated(loweredPlan("1F1B", p, m), evenCosts(p));
      for (std::int32_t stage = 0; stage < p; ++stage) {
        EXPECT_EQ(gpipe.ranks[stage].peakLiveActivations, m);
        EXPECT_EQ(oneFOneB.ranks[stage].peakLiveActivations, std::min(m, p - stage));
      }
    }
  }
}

TEST(Simulate, ATransferDelaysEachHop) {
  const double transfer = 0.25;
  const Plan compute = computePlan("GPipe", 4, 3);
  const Plan preposted = prepostReceives(*insertCommunication(compute), 1);
  // The critical path crosses 3 edges forth and 3 back.
  const double expected = 6 * (kForward + kBackward) + 6 * transfer;
  EXPECT_DOUBLE_EQ(simulated(compute, evenCosts(4, transfer)).makespan, expected);
  EXPECT_DOUBLE_EQ(simulated(preposted, evenCosts(4, transfer)).makespan, expected);
  // A receive that is posted only when it is needed leaves two more transfers in each direction uncovered.
  EXPECT_DOUBLE_EQ(simulated(loweredPlan("GPipe", 4, 3), evenCosts(4, transfer)).makespan, expected + 4 * transfer);
}

TEST(Simulate, AReceiveThatIsPostedLateMakesItsTransferLate) {
  const SimulationCosts costs{{{1, 1, 0, 0}, {4, 4, 0, 0}}, 0.5};
  const SimulationResult early = simulated(planOf("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1\n"), costs);
  const SimulationResult late = simulated(planOf("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n"), costs);
  EXPECT_DOUBLE_EQ(early.makespan, 1 + 0.5 + 4 + 4);
  EXPECT_DOUBLE_EQ(late.makespan, 1 + 0.5 + 4 + 0.5 + 4);
}

TEST(Simulate, AWaitForASendLastsUntilTheReceiverTookIt) {
  const SimulationCosts costs{{{1, 1, 0, 0}, {4, 4, 0, 0}}, 0.5};
  const Plan plan = planOf("0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND1\n1RECV_F0,1F0,1RECV_F1,1F1\n");
  const TimedAction wait = simulated(plan, costs).ranks[0].actions.back();
  EXPECT_EQ(toString(wait.action), "0WAIT_SEND1");
  EXPECT_DOUBLE_EQ(wait.start, 2);
  EXPECT_DOUBLE_EQ(wait.end, 6);  // posted at 1 + 0.5 + 4, half a second under way
}

TEST(Simulate, EachActionMayHaveItsOwnDuration) {
  const Plan plan = computePlan("GPipe", 2, 2);
  const ActionCost cost = [](std::int32_t rank, const Action& action) {
    return toString(action) == "1F1" ? 10.0 : 1.0;
  };
  const Result<SimulationResult> result = simulate(plan, cost, 0);
  ASSERT_TRUE(result) << result.status().toString();
  EXPECT_DOUBLE_EQ(result->makespan, 2 + 10 + 3);
  EXPECT_DOUBLE_EQ(result->ranks[0].busy, 4);
  EXPECT_DOUBLE_EQ(result->ranks[1].busy, 13);
}

TEST(Simulate, ListsEveryActionInOrderAndRanksDoOneThingAtATime) {
  const Plan plan = planOf(readGolden("dualpipev_p2_m8_comms.csv"));
  const SimulationResult result = simulated(plan, evenCosts(4, 0.125));
  for (std::int32_t rank = 0; rank < plan.numRanks(); ++rank) {
    ASSERT_EQ(result.ranks[rank].actions.size(), plan.ranks[rank].size());
    double clock = 0;
    for (std::size_t step = 0; step < plan.ranks[rank].size(); ++step) {
      const TimedAction& timed = result.ranks[rank].actions[step];
      EXPECT_EQ(timed.action, plan.ranks[rank][step]);
      EXPECT_GE(timed.start, clock);
      EXPECT_GE(timed.end, timed.start);
      clock = timed.end;
    }
    EXPECT_LE(clock, result.makespan);
    EXPECT_DOUBLE_EQ(result.ranks[rank].busy, 8 * 2 * (kForward + kBackward));
  }
}

TEST(Simulate, LiveActivationsOfASplitBackwardLastUntilW) {
  const SimulationResult result = simulated(planOf("0F0,0F1,0I0,0I1,0F2,0W0,0W1,0I2,0W2\n"), evenCosts(1));
  EXPECT_EQ(result.ranks[0].peakLiveActivations, 3);
  EXPECT_EQ(simulated(planOf("0F0,0F1\n"), evenCosts(1)).ranks[0].peakLiveActivations, 0);
}

// An oracle of another kind: sweeps all dependencies until the times settle.
double relaxedMakespan(const Plan& plan, const ActionCost& cost, double transfer) {
  struct Node {
    Action action;
    std::int32_t rank;
    double end;
  };
  std::vector<Node> nodes;
  for (std::int32_t rank = 0; rank < plan.numRanks(); ++rank) {
    for (const Action& action : plan.ranks[rank]) nodes.push_back({action, rank, 0});
  }
  double makespan = 0;
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      Node& node = nodes[i];
      double start = i > 0 && nodes[i - 1].rank == node.rank ? nodes[i - 1].end : 0;
      const bool forward = node.action.kind == ActionKind::kForward;
      for (const Node& other : nodes) {
        const bool feeds = other.action.kind == node.action.kind && other.action.microbatch == node.action.microbatch &&
                           other.action.stage == node.action.stage + (forward ? -1 : 1);
        if (feeds) start = std::max(start, other.end + (other.rank == node.rank ? 0 : transfer));
      }
      const double end = start + cost(node.rank, node.action);
      changed |= end != node.end;
      node.end = end;
      makespan = std::max(makespan, end);
    }
  }
  return makespan;
}

TEST(Simulate, RandomDurationsAgreeWithRelaxationOfTheDependencyGraph) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 100; ++i) {
    const auto p = static_cast<std::int32_t>(1 + random() % 4);
    const auto m = static_cast<std::int32_t>(1 + random() % 6);
    const Plan plan = computePlan(random() % 2 == 0 ? "GPipe" : "1F1B", p, m);
    const std::uint64_t salt = random();
    const ActionCost cost = [&](std::int32_t, const Action& action) {
      return static_cast<double>(std::hash<std::string>{}(toString(action) + std::to_string(salt)) % 1000) / 64;
    };
    const double transfer = static_cast<double>(random() % 8) / 4;
    const Result<SimulationResult> result = simulate(plan, cost, transfer);
    ASSERT_TRUE(result) << result.status().toString();
    ASSERT_DOUBLE_EQ(result->makespan, relaxedMakespan(plan, cost, transfer));
    // With free transfers, posts in time change nothing.
    const Result<SimulationResult> lowered = simulate(*insertCommunication(plan), cost, 0);
    ASSERT_DOUBLE_EQ(lowered->makespan, relaxedMakespan(plan, cost, 0));
  }
}

TEST(Simulate, AStageWaitsForTheLastThatItNeeds) {
  Plan compute = planOf("0F0,0B0\n1F0,1B0\n2F0,2B0\n3F0,3B0\n");
  compute.edges = {{0, 1}, {0, 2}, {1, 3}, {2, 3}};
  const SimulationCosts costs{{{1, 1, 0, 0}, {2, 2, 0, 0}, {5, 3, 0, 0}, {1, 1, 0, 0}}, 0.5};
  for (const Plan& plan : {compute, *insertCommunication(compute)}) {
    const SimulationResult result = simulated(plan, costs);
    const auto ends = [&](std::int32_t rank) { return result.ranks[rank].actions.back().end; };
    // 0 -> 2 -> 3 by 1 + 0.5 + 5 + 0.5, and back by 0.5 + 3 + 0.5; 1 is done in less.
    EXPECT_DOUBLE_EQ(result.makespan, 14);
    EXPECT_DOUBLE_EQ(ends(1), 11.5);
    EXPECT_DOUBLE_EQ(ends(2), 12.5);
  }
}

TEST(Simulate, AWaitForSendsEndsWithTheLastOfThem) {
  Plan plan = planOf("0F0,0SEND_F0,0SEND_F0>2,0WAIT_SEND_F0\n1RECV_F0,1F0\n3F0,2RECV_F0<0,2F0\n");
  plan.edges = {{0, 1}, {0, 2}};
  const SimulationCosts costs{{{1, 0, 0, 0}, {1, 0, 0, 0}, {1, 0, 0, 0}, {4, 0, 0, 0}}, 0.5};
  // 2 receives after 3's forward.
  EXPECT_DOUBLE_EQ(simulated(plan, costs).ranks[0].actions.back().end, 4.5);
}

TEST(Simulate, RefusesWhatCannotRunAndImpossibleCosts) {
  const SimulationCosts costs = evenCosts(2);
  const auto refusal = [&](const Plan& plan) { return simulate(plan, costs).status().toString(); };
  EXPECT_EQ(refusal(planOf("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")),
            "deadlock: 2 ranks wait for each other and stop at\n  rank 0, step 1 (0B0)\n  rank 1, step 0 (1F1)");
  EXPECT_NE(refusal(planOf("0F0,0SEND_F0\n1F0\n", {0, 1})).find("1RECV_F0 is missing"), std::string::npos);
  EXPECT_EQ(refusal(computePlan("GPipe", 3, 1)), "costs.stages has 2 entries; expected one per stage, 3");
  const Plan plan = computePlan("GPipe", 2, 1);
  EXPECT_EQ(simulate(plan, {{{1, 1, 0, 0}, {-1, 1, 0, 0}}, 0}).status().toString(),
            "rank 1, step 0 (1F0): the cost is -1.000000 seconds; expected a finite number, at least 0");
  EXPECT_NE(simulate(plan, evenCosts(2, std::nan(""))).status().toString().find("transfer is nan"), std::string::npos);
}

}  // namespace
}  // namespace farandole::pipeline
