#include "tests/pipeline/schedules/schedule_checks.h"

#include <gtest/gtest.h>

#include <string>

#include "pipeline/passes/lower.h"
#include "pipeline/schedules/registry.h"

namespace farandole::pipeline {

void checkSchedule(std::string_view name, const Shapes& shapes, const CheckSchedule& check) {
  for (const std::int32_t p : {1, 2, 4, 8, 16}) {
    for (std::int32_t v = shapes.fewestStagesPerRank; v <= shapes.mostStagesPerRank; ++v) {
      // Every count of microbatches where that is quick.
      const std::int32_t step = p <= 4 ? 1 : p - 1;
      for (std::int32_t m = shapes.fewestMicrobatches * p; m <= 8 * p; m += step) {
        SCOPED_TRACE(std::string(name) + " p " + std::to_string(p) + " v " + std::to_string(v) + " m " +
                     std::to_string(m));
        const ScheduleOptions options{p, p * v, m, false};
        const Result<Plan> plan = makePlan(name, options);
        ASSERT_TRUE(plan) << plan.status().toString();
        const std::vector<StageCost> costs(static_cast<std::size_t>(p) * v, {1, 2, 1, 1});
        const Result<SimulationResult> simulated = simulate(*plan, {costs, 0});
        ASSERT_TRUE(simulated) << simulated.status().toString();
        check(options, *plan, *simulated);
        if (m % (4 * p) < step) {
          const Result<Plan> lowered = lower(*plan, ChannelModel::kFifoPerEdge);
          ASSERT_TRUE(lowered) << lowered.status().toString();
          const Result<SimulationResult> again = simulate(*lowered, {costs, 0});
          ASSERT_TRUE(again) << again.status().toString();
          EXPECT_DOUBLE_EQ(again->makespan, simulated->makespan) << "lowered";
        }
        ASSERT_FALSE(::testing::Test::HasFailure());
      }
    }
  }
}

}  // namespace farandole::pipeline
