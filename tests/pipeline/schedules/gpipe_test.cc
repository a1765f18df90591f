#include "pipeline/schedules/gpipe.h"

#include <gtest/gtest.h>

#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

TEST(GPipe, RunsAllForwardsThenAllBackwards) {
  EXPECT_EQ(rankText(*makeGPipe({3, 3, 2, false}), 1), "1F0 1F1 1B0 1B1");
}

TEST(GPipe, EqualsTorch) {
  EXPECT_EQ(*makeGPipe({1, 1, 3, false}), goldenSchedule("gpipe_p1_m3.csv"));
  EXPECT_EQ(*makeGPipe({2, 2, 4, false}), goldenSchedule("gpipe_p2_m4.csv"));
  EXPECT_EQ(*makeGPipe({4, 4, 4, false}), goldenSchedule("gpipe_p4_m4.csv"));
  EXPECT_EQ(*makeGPipe({4, 4, 9, false}), goldenSchedule("gpipe_p4_m9.csv"));
}

TEST(GPipe, ForwardOnlyHasNoBackward) { EXPECT_EQ(rankText(*makeGPipe({2, 2, 3, true}), 1), "1F0 1F1 1F2"); }

TEST(GPipe, RefusesWhatItCannotRun) {
  EXPECT_EQ(makeGPipe({2, 2, 0, false}).status().toString(),
            "schedule GPipe: numMicrobatches is 0; expected at least 1");
  EXPECT_EQ(makeGPipe({0, 2, 1, false}).status().toString(), "schedule GPipe: numRanks is 0; expected at least 1");
  EXPECT_EQ(makeGPipe({2, -1, 1, false}).status().toString(), "schedule GPipe: numStages is -1; expected at least 1");
  EXPECT_EQ(makeGPipe({2, 4, 1, false}).status().toString(),
            "schedule GPipe: numStages is 4; expected one per rank, numRanks = 2");
}

}  // namespace
}  // namespace farandole::pipeline
