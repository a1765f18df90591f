#include "pipeline/ir/draw.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

SimulationResult simulatedWith(const Plan& plan, StageCost cost) {
  return *simulate(plan, SimulationCosts{std::vector<StageCost>(static_cast<std::size_t>(plan.numStages), cost), 0});
}

TEST(DrawTimeline, ShowsBlocksAsWideAsTheyLastAndIdleTimeAsDots) {
  const SimulationResult result = simulatedWith(loweredPlan("1F1B", 2, 2), {1, 2, 0, 0});
  EXPECT_EQ(drawTimeline(result, 36),
            "step 9 s, bubble 33.33%\n"
            "rank 0 |F0--F1--........B0======....B1======| busy 66.67%, live 2\n"
            "rank 1 |....F0--B0======F1--B1======........| busy 66.67%, live 1\n");
}

TEST(DrawTimeline, KeepsLettersWhenThereIsNoRoomForNumbers) {
  const SimulationResult result = simulatedWith(loweredPlan("GPipe", 2, 2), {1, 1, 0, 0});
  EXPECT_EQ(drawTimeline(result, 6),
            "step 6 s, bubble 33.33%\n"
            "rank 0 |FF..BB| busy 66.67%, live 2\n"
            "rank 1 |.FFBB.| busy 66.67%, live 2\n");
}

TEST(DrawTimeline, RowsAreEquallyLongAtAnyWidth) {
  const SimulationResult result = simulatedWith(planOf(readGolden("dualpipev_p2_m8_comms.csv")), {1, 2, 1, 1});
  for (int columns : {-1, 1, 7, 100, 333}) {
    const std::string text = drawTimeline(result, columns);
    for (std::size_t bar = text.find('|'); bar != std::string::npos;) {
      const std::size_t end = text.find('|', bar + 1);
      EXPECT_EQ(end - bar - 1, static_cast<std::size_t>(std::max(columns, 1)));
      bar = text.find('|', end + 1);
    }
  }
}

}  // namespace
}  // namespace farandole::pipeline
