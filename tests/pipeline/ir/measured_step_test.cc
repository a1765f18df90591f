#include "pipeline/ir/measured_step.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

std::vector<std::vector<TimedAction>> actionsOf(const SimulationResult& step) {
  std::vector<std::vector<TimedAction>> ranks;
  for (const RankTimeline& rank : step.ranks) ranks.push_back(rank.actions);
  return ranks;
}

TEST(MeasuredStep, SaysOfASimulatedStepsTimesWhatTheSimulationSays) {
  std::vector<Plan> plans = {planOf("0F0,0F1\n1F0,1F1\n")};
  for (const std::string& name : goldenPlansWithMessages()) plans.push_back(planOf(readGolden(name)));
  for (const Plan& plan : plans) {
    SCOPED_TRACE(rankText(plan, 0));
    const auto simulated = simulate(
        plan, SimulationCosts{std::vector<StageCost>(static_cast<std::size_t>(plan.numStages), {1, 2, 1, 1}), 0.5});
    ASSERT_TRUE(simulated) << simulated.status().toString();
    const auto measured = measuredStep(actionsOf(*simulated));
    ASSERT_TRUE(measured) << measured.status().toString();
    EXPECT_EQ(measured->makespan, simulated->makespan);
    EXPECT_FALSE(measured->transfer);
    for (std::size_t rank = 0; rank < simulated->ranks.size(); ++rank) {
      EXPECT_EQ(measured->ranks[rank].busy, simulated->ranks[rank].busy);
      EXPECT_EQ(measured->ranks[rank].bubble, simulated->ranks[rank].bubble);
      EXPECT_EQ(measured->ranks[rank].peakLiveActivations, simulated->ranks[rank].peakLiveActivations);
    }
  }
}

TEST(MeasuredStep, RefusesTimesThatNoClockShows) {
  const Action forward{0, ActionKind::kForward, 3, {}};
  for (const auto& [start, end] :
       {std::pair(2.0, 1.0), std::pair(-1.0, 1.0), std::pair(0.0, std::numeric_limits<double>::infinity()),
        std::pair(std::numeric_limits<double>::quiet_NaN(), 1.0)}) {
    const auto step = measuredStep({{{forward, start, end}}});
    ASSERT_FALSE(step);
    EXPECT_NE(step.status().toString().find("0F3 lasts from"), std::string::npos) << step.status().toString();
  }
}

}  // namespace
}  // namespace farandole::pipeline
