#include "pipeline/schedules/auto_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>

#include "pipeline/passes/lower.h"
#include "pipeline/schedules/registry.h"
#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

MeasuredCosts evenCosts(std::int32_t numStages, double memoryLimit = 1e9) {
  const auto count = static_cast<std::size_t>(numStages);
  return {{std::vector<StageCost>(count, {1, 2, 1, 1}), 0}, std::vector<StageMemory>(count, {1, 0.5}), memoryLimit};
}

MeasuredCosts randomCosts(std::int32_t numStages, std::mt19937_64& random) {
  MeasuredCosts costs;
  const auto some = [&](double most) { return most * static_cast<double>(1 + random() % 100) / 100; };
  for (std::int32_t stage = 0; stage < numStages; ++stage) {
    const double input = some(2);
    const double weight = some(2);
    costs.times.stages.push_back({some(2), input + weight, input, weight});
    const double activations = some(10);
    costs.memory.push_back({activations, activations * some(1)});
  }
  costs.times.transfer = some(0.5);
  return costs;
}

// Another way to count: what is held after each action, by the set of what has begun and not ended.
double heldAtMost(const Plan& plan, std::int32_t rank, const std::vector<StageMemory>& memory) {
  std::map<std::pair<std::int32_t, std::int32_t>, double> held;
  double most = 0;
  for (const Action& action : plan.ranks[rank]) {
    const std::vector<Action> parts = action.parts.empty() ? std::vector<Action>{action} : action.parts;
    for (const Action& part : parts) {
      if (part.kind == ActionKind::kForward) held[{part.stage, part.microbatch}] = memory[part.stage].activations;
    }
    double sum = 0;
    for (const auto& [key, bytes] : held) sum += bytes;
    most = std::max(most, sum);
    for (const Action& part : parts) {
      const std::pair key(part.stage, part.microbatch);
      if (part.kind == ActionKind::kBackwardInput) held[key] = memory[part.stage].forWeights;
      if (part.kind == ActionKind::kBackward || part.kind == ActionKind::kBackwardWeight) held.erase(key);
    }
  }
  return most;
}

double makespanAsRun(const Plan& plan, const SimulationCosts& costs) {
  return simulate(*lower(plan, ChannelModel::kTagged), costs)->makespan;
}

TEST(AutoPlan, IsNeverWorseThanTheBestScheduleUnderTheSameLimitAndRuns) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  int searched = 0;
  int refused = 0;
  for (int i = 0; i < 200; ++i) {
    const auto p = static_cast<std::int32_t>(1 + random() % 5);
    const auto v = static_cast<std::int32_t>(1 + random() % 3);
    const auto m = static_cast<std::int32_t>(1 + random() % 12);
    ScheduleOptions options{p, p * v, m, false};
    if (i % 3 == 2) options.edges = randomEdges(p * v, random);
    MeasuredCosts costs = randomCosts(p * v, random);
    costs.memoryLimit = static_cast<double>(10 + random() % 100);
    double best = std::numeric_limits<double>::infinity();
    for (const std::string_view name : scheduleNames()) {
      const auto plan = makePlan(name, options);
      if (!plan || plan->edges != options.edges) continue;  // DualPipe's is another model's
      double peak = 0;
      for (std::int32_t rank = 0; rank < p; ++rank) peak = std::max(peak, heldAtMost(*plan, rank, costs.memory));
      if (peak <= costs.memoryLimit) best = std::min(best, makespanAsRun(*plan, costs.times));
    }
    const auto made = makeAutoPlan(options, costs);
    if (!made) {
      EXPECT_EQ(best, std::numeric_limits<double>::infinity());
      EXPECT_NE(made.status().toString().find("memoryLimit is"), std::string::npos) << made.status().toString();
      ++refused;
      continue;
    }
    EXPECT_LE(made->chosen.makespan, best);
    EXPECT_DOUBLE_EQ(makespanAsRun(made->plan, costs.times), made->chosen.makespan);
    for (std::int32_t rank = 0; rank < p; ++rank) {
      EXPECT_LE(heldAtMost(made->plan, rank, costs.memory), costs.memoryLimit + 1e-9);
    }
    for (const ChannelModel model :
         {ChannelModel::kTagged, ChannelModel::kFifoPerEdge, ChannelModel::kOneQueuePerRank}) {
      const auto lowered = lower(made->plan, model);
      EXPECT_TRUE(lowered) << made->chosen.name << ": " << lowered.status().toString();
    }
    searched += made->chosen.name.starts_with("list") ? 1 : 0;
    ASSERT_FALSE(HasFailure()) << "p " << p << " v " << v << " m " << m;
  }
  EXPECT_GT(searched, 20) << "stages that differ are what a fixed schedule does not know";
  EXPECT_GT(refused, 0);
}

TEST(AutoPlan, TakesTheScheduleThatTheMemoryAllows) {
  const ScheduleOptions options{4, 8, 16, false};
  const auto chosen = [&](double limit) {
    const auto made = makeAutoPlan(options, evenCosts(8, limit));
    EXPECT_TRUE(made) << made.status().toString();
    return made ? *made : AutoPlan{};
  };
  const AutoPlan free = chosen(1e9);
  EXPECT_LE(free.chosen.makespan, 6 * 16 + 3.0) << "no more than ZBV's";
  const AutoPlan tight = chosen(5);
  EXPECT_LE(tight.chosen.peakMemory, 5);
  EXPECT_GT(tight.chosen.makespan, free.chosen.makespan);
  EXPECT_NE(tight.reason.find("that hold 5e-06 MB or less"), std::string::npos) << tight.reason;
  EXPECT_NE(tight.reason.find("; "), std::string::npos) << "names what is faster and does not fit: " << tight.reason;
}

TEST(AutoPlan, KeepsToAGivenPlacement) {
  const std::vector<std::int32_t> odd{0, 1, 1, 0, 2, 2};
  const auto made = makeAutoPlan({3, 6, 9, false}, evenCosts(6), odd);
  ASSERT_TRUE(made) << made.status().toString();
  EXPECT_EQ(made->plan.rankOfStage, odd);
  EXPECT_TRUE(lower(made->plan, ChannelModel::kTagged));
  const auto v = makeAutoPlan({2, 4, 8, false}, evenCosts(4), std::vector<std::int32_t>{0, 1, 1, 0});
  EXPECT_EQ(v->plan.rankOfStage, (std::vector<std::int32_t>{0, 1, 1, 0}));
}

TEST(AutoPlan, ForwardOnlyHasNoBackwardAndNoLimit) {
  const auto made = makeAutoPlan({2, 4, 3, true}, evenCosts(4, 0.001));
  ASSERT_TRUE(made) << made.status().toString();
  for (const auto& actions : made->plan.ranks) {
    for (const Action& action : actions) EXPECT_EQ(action.kind, ActionKind::kForward);
  }
  EXPECT_DOUBLE_EQ(made->chosen.makespan, 3 * 2 + 1.0);
}

TEST(AutoPlan, SaysWhatDoesNotFit) {
  const auto error = [](const auto& made) { return made.status().toString(); };
  EXPECT_NE(error(makeAutoPlan({2, 2, 4, false}, evenCosts(2, 0.5))).find("expected as much as a plan needs: "),
            std::string::npos);
  EXPECT_EQ(error(makeAutoPlan({2, 2, 4, false}, evenCosts(3))),
            "costs.times.stages has 3 entries; expected one for each stage, 2");
  EXPECT_EQ(error(makeAutoPlan({2, 2, 4, false}, evenCosts(2), std::vector<std::int32_t>{0, 2})),
            "rankOfStage has 2; expected ranks from 0 to 1");
  EXPECT_EQ(error(makeAutoPlan({2, 2, 0, false}, evenCosts(2))),
            "schedule auto: numMicrobatches is 0; expected at least 1");
  MeasuredCosts costs = evenCosts(2);
  costs.times.stages[1].backwardWeight = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(error(makeAutoPlan({2, 2, 4, false}, costs)),
            "costs.times.stages of stage 1 has nan; expected finite numbers, at least 0");
  costs = evenCosts(2);
  costs.memory[0].activations = -1;
  EXPECT_EQ(error(makeAutoPlan({2, 2, 4, false}, costs)),
            "costs.memory of stage 0 has -1; expected finite numbers, at least 0");
}

TEST(ListSchedule, GoesOnWhereOneMicrobatchHasRoom) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 300; ++i) {
    const auto p = static_cast<std::int32_t>(1 + random() % 5);
    const auto numStages = static_cast<std::int32_t>(p + random() % 8);
    std::vector<std::int32_t> rankOfStage(static_cast<std::size_t>(numStages));
    for (std::int32_t stage = 0; stage < numStages; ++stage) {
      rankOfStage[stage] = stage < p ? stage : static_cast<std::int32_t>(random() % p);
    }
    MeasuredCosts costs = randomCosts(numStages, random);
    std::vector<double> least(p);
    for (std::int32_t stage = 0; stage < numStages; ++stage)
      least[rankOfStage[stage]] += costs.memory[stage].activations;
    costs.memoryLimit = std::ranges::max(least) + 1e-9;
    ScheduleOptions options{p, numStages, static_cast<std::int32_t>(1 + random() % 9), false};
    if (i % 2 == 1) options.edges = randomEdges(numStages, random);
    for (const bool splits : {false, true}) {
      for (const bool latestFirst : {false, true}) {
        const auto plan = listSchedule(options, rankOfStage, costs, {splits, latestFirst});
        ASSERT_TRUE(plan);
        EXPECT_LE(std::ranges::max(peakMemory(*plan, costs.memory)), costs.memoryLimit);
        const auto run = simulate(*plan, costs.times);
        ASSERT_TRUE(run) << run.status().toString();
      }
    }
  }
}

}  // namespace
}  // namespace farandole::pipeline
