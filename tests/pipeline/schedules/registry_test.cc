#include "pipeline/schedules/registry.h"

#include <gtest/gtest.h>

#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

TEST(Registry, FindsSchedulesInUpperAndLowerCaseAlike) {
  const ScheduleOptions options{2, 2, 4, false};
  for (std::string_view name : {"GPipe", "gpipe", "GPIPE"}) {
    EXPECT_EQ(*makePlan(name, options), computePlan("GPipe", 2, 4));
  }
  EXPECT_EQ(*makePlan("1f1b", options), computePlan("1F1B", 2, 4));
  EXPECT_NE(*makePlan("1f1b", options), *makePlan("gpipe", options));
}

TEST(Registry, EveryNameItListsIsKnown) {
  EXPECT_GT(scheduleNames().size(), 7u);
  for (std::string_view name : scheduleNames()) {
    const bool hasTwo = !makePlan(name, {2, 2, 4, false});
    EXPECT_TRUE(makePlan(name, {2, hasTwo ? 4 : 2, 4, false})) << name;
  }
}

TEST(Registry, AnUnknownNameListsTheKnownOnes) {
  EXPECT_EQ(makePlan("zigzag", {}).status().toString(),
            "schedule name is 'zigzag'; expected one of none, GPipe, 1F1B, Interleaved1F1B, LoopedBFS, ZB-H1, ZB-H2, "
            "InterleavedZeroBubble, ZBV, V-Half, V-Min, DualPipe, DualPipeV");
}

}  // namespace
}  // namespace farandole::pipeline
