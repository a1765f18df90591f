#include "pipeline/ir/memory_curve.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>

#include "pipeline/ir/action_kind.h"
#include "pipeline/passes/lower.h"
#include "pipeline/schedules/registry.h"
#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

class RandomSteps : public ::testing::Test {
 protected:
  double number(double most) { return std::uniform_real_distribution<double>(0, most)(random_); }

  // Whole numbers, whose sums are exact; some of them are 0.
  double whole(std::uint64_t most) { return static_cast<double>(random_() % (most + 1)); }

  SimulationCosts costs(std::int32_t numStages) {
    SimulationCosts costs;
    for (std::int32_t stage = 0; stage < numStages; ++stage) {
      costs.stages.push_back({whole(3), whole(5), whole(3), whole(3)});
    }
    costs.transfer = whole(2);
    return costs;
  }

  std::vector<StageMemory> memory(std::int32_t numStages) {
    std::vector<StageMemory> stages;
    for (std::int32_t stage = 0; stage < numStages; ++stage) {
      const double activations = whole(8);
      stages.push_back({activations, std::min(activations, whole(4))});
    }
    return stages;
  }

  std::mt19937_64 random_;
};

// From first principles: what each microbatch of each stage keeps at a time, on all ranks.
double heldAt(const SimulationResult& step, const std::vector<StageMemory>& memory, double time) {
  std::map<std::pair<std::int32_t, std::int32_t>, double> held;
  for (const RankTimeline& rank : step.ranks) {
    for (const TimedAction& timed : rank.actions) {
      for (const Action& leaf : leaves(timed.action)) {
        double& bytes = held[{leaf.stage, leaf.microbatch}];
        const StageMemory& stage = memory[leaf.stage];
        if (leaf.kind == ActionKind::kForward && timed.start <= time) bytes += stage.activations;
        if (timed.end > time) continue;
        if (leaf.kind == ActionKind::kBackward) bytes -= stage.activations;
        if (leaf.kind == ActionKind::kBackwardInput) bytes += stage.forWeights - stage.activations;
        if (leaf.kind == ActionKind::kBackwardWeight) bytes -= stage.forWeights;
      }
    }
  }
  double sum = 0;
  for (const auto& [key, bytes] : held) sum += bytes;
  return sum;
}

double valueAt(const MemoryCurve& curve, double time) {
  double bytes = 0;
  for (const MemoryPoint& point : curve.points) bytes = point.time <= time ? point.bytes : bytes;
  return bytes;
}

TEST_F(RandomSteps, HoldAtEveryTimeWhatTheirMicrobatchesKeepAndPeakAsThePlanSays) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  random_.seed(seed);
  for (const std::string_view name : scheduleNames()) {
    int made = 0;
    for (int i = 0; i < 1000 && made < 30; ++i) {  // some run few counts
      const auto p = static_cast<std::int32_t>(1 + random_() % 4);
      const auto numStages = static_cast<std::int32_t>(p * (1 + random_() % 3));
      const auto plan =
          makePlan(name, {p, numStages, static_cast<std::int32_t>(1 + random_() % 9), random_() % 8 == 0});
      if (!plan) continue;
      ++made;
      SCOPED_TRACE(std::string(name) + " on " + std::to_string(p) + " ranks, " + std::to_string(numStages) + " stages");
      const auto lowered = lower(*plan, ChannelModel::kTagged);
      ASSERT_TRUE(lowered) << lowered.status().toString();
      const std::vector<StageMemory> stages = memory(numStages);
      for (const Plan& one : {*plan, *lowered}) {
        const auto step = simulate(one, costs(numStages));
        ASSERT_TRUE(step) << step.status().toString();
        const auto curves = memoryOverTime(*step, stages);
        ASSERT_TRUE(curves);
        std::vector<double> peaks;
        for (const MemoryCurve& curve : *curves) {
          peaks.push_back(curve.peak);
          EXPECT_EQ(curve.points.back().bytes, 0);
          EXPECT_TRUE(std::ranges::is_sorted(curve.points, {}, &MemoryPoint::time));
        }
        EXPECT_EQ(peaks, peakMemory(one, stages));
        if (std::ranges::max(peaks) == 0) continue;  // forward only holds nothing
        const double time = number(step->makespan);
        double sum = 0;
        for (const MemoryCurve& curve : *curves) sum += valueAt(curve, time);
        EXPECT_EQ(sum, heldAt(*step, stages, time)) << "at " << time;
      }
    }
    EXPECT_GT(made, 0) << name;
  }
}

TEST(MemoryOverTime, NamesAStageThatItIsNotToldOf) {
  const auto step = simulate(computePlan("1F1B", 3, 2), SimulationCosts{std::vector<StageCost>(3, {1, 2, 0, 0}), 0});
  EXPECT_EQ(memoryOverTime(*step, std::vector<StageMemory>(2)).status().toString(),
            "memory has 2 entries; expected one for each stage, and there is a stage 2");
}

}  // namespace
}  // namespace farandole::pipeline
