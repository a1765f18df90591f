#include "pipeline/ir/plan_ends.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "pipeline/schedules/registry.h"

namespace farandole::pipeline {
namespace {

using Numbers = std::vector<std::int32_t>;

TEST(PlanEnds, OfAChainAreItsFirstAndItsLastStage) {
  const PlanEnds ends = *PlanEnds::of(*makePlan("1F1B", {3, 3, 4}));
  for (int stage = 0; stage < 3; ++stage) {
    EXPECT_EQ(ends.isFirst(stage), stage == 0);
    EXPECT_EQ(ends.isLast(stage), stage == 2);
  }
  EXPECT_EQ(*ends.microbatchesOfOneModel(), 4);
  EXPECT_EQ(ends.microbatchesThatEndIn(std::array{2}), (Numbers{0, 1, 2, 3}));
  EXPECT_TRUE(ends.microbatchesThatEndIn(std::array{0, 1}).empty());
}

TEST(PlanEnds, OfTwoCopiesEachHaveTheirMicrobatches) {
  const Plan plan = *makePlan("DualPipe", {2, 4, 8});
  const PlanEnds ends = *PlanEnds::of(plan);
  EXPECT_EQ(*ends.microbatchesOfOneModel(), 4);
  Numbers seen;
  int last = 0;
  for (int stage = 0; stage < plan.numStages; ++stage) {
    if (!ends.isLast(stage)) continue;
    ++last;
    const Numbers here = ends.microbatchesThatEndIn(std::array{stage});
    EXPECT_EQ(here.size(), 4u);
    seen.insert(seen.end(), here.begin(), here.end());
  }
  EXPECT_EQ(last, 2);
  std::ranges::sort(seen);
  EXPECT_EQ(seen, (Numbers{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(PlanEnds, AreRefusedWhereAMicrobatchHasTwo) {
  Plan plan = *makePlan("GPipe", {3, 3, 2});
  plan.edges = {{0, 1}, {0, 2}};
  const Status refused = PlanEnds::of(plan).status();
  EXPECT_NE(refused.toString().find("microbatch 0 ends in stages 1 and 2, expected one"), std::string::npos)
      << refused.toString();
}

TEST(PlanEnds, OfUnequalCopiesHaveNoMean) {
  Plan plan{2, 3, {0, 0}, {{}}};
  plan.edges.emplace();
  plan.microbatchesOfStage = {{0, 1}, {1, 3}};
  const PlanEnds ends = *PlanEnds::of(plan);
  EXPECT_EQ(ends.microbatchesThatEndIn(std::array{0, 1}), (Numbers{0, 1, 2}));
  EXPECT_EQ(ends.microbatchesOfOneModel().status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace farandole::pipeline
