#include "pipeline/schedules/one_f_one_b.h"

#include <gtest/gtest.h>

#include "pipeline/ir/simulate.h"
#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

TEST(OneFOneB, AlternatesAfterAWarmUpThatShrinksFromStageToStage) {
  const Plan plan = *makeOneFOneB({3, 3, 4, false});
  EXPECT_EQ(rankText(plan, 0), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
  EXPECT_EQ(rankText(plan, 1), "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3");
  EXPECT_EQ(rankText(plan, 2), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3");
}

TEST(OneFOneB, EqualsTorch) {
  EXPECT_EQ(*makeOneFOneB({1, 1, 3, false}), goldenSchedule("1f1b_p1_m3.csv"));
  EXPECT_EQ(*makeOneFOneB({2, 2, 4, false}), goldenSchedule("1f1b_p2_m4.csv"));
  EXPECT_EQ(*makeOneFOneB({4, 4, 4, false}), goldenSchedule("1f1b_p4_m4.csv"));
  EXPECT_EQ(*makeOneFOneB({4, 4, 9, false}), goldenSchedule("1f1b_p4_m9.csv"));
}

TEST(OneFOneB, RunsFewerMicrobatchesThanStages) {
  const Plan plan = *makeOneFOneB({4, 4, 2, false});
  EXPECT_EQ(rankText(plan, 0), "0F0 0F1 0B0 0B1");
  EXPECT_EQ(rankText(plan, 2), "2F0 2F1 2B0 2B1");
  EXPECT_EQ(rankText(plan, 3), "3F0 3B0 3F1 3B1");
}

TEST(OneFOneB, WarmsUpTwiceAsLongWhereThatIsAsked) {
  ScheduleOptions options{3, 3, 6, false};
  options.warmupPerStage = 2;
  const Plan plan = *makeOneFOneB(options);
  EXPECT_EQ(rankText(plan, 0), "0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5");
  EXPECT_EQ(rankText(plan, 1), "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5");
  EXPECT_EQ(rankText(plan, 2), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5");
  for (const std::int32_t p : {2, 4, 8, 16}) {
    for (std::int32_t m = 1; m <= 3 * p; ++m) {
      const ScheduleOptions deep{p, p, m, false, 2};
      const auto run = simulate(*makeOneFOneB(deep), {std::vector<StageCost>(p, {1, 2, 1, 1}), 0});
      ASSERT_TRUE(run) << run.status().toString();
      EXPECT_DOUBLE_EQ(run->makespan, 3.0 * (m + p - 1));
      for (std::int32_t rank = 0; rank < p; ++rank) {
        EXPECT_EQ(run->ranks[rank].peakLiveActivations, std::min(m, 2 * (p - rank - 1) + 1));
      }
    }
  }
  options.warmupPerStage = 0;
  EXPECT_EQ(makeOneFOneB(options).status().toString(), "schedule 1F1B: warmupPerStage is 0; expected at least 1");
}

TEST(OneFOneB, ForwardOnlyHasNoBackward) { EXPECT_EQ(rankText(*makeOneFOneB({2, 2, 3, true}), 0), "0F0 0F1 0F2"); }

TEST(OneFOneB, RefusesWhatItCannotRun) {
  EXPECT_EQ(makeOneFOneB({2, 2, -3, false}).status().toString(),
            "schedule 1F1B: numMicrobatches is -3; expected at least 1");
  EXPECT_EQ(makeOneFOneB({4, 2, 1, false}).status().toString(),
            "schedule 1F1B: numStages is 2; expected one per rank, numRanks = 4");
}

}  // namespace
}  // namespace farandole::pipeline
