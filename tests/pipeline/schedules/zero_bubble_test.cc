#include "pipeline/schedules/zero_bubble.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/pipeline/schedules/schedule_checks.h"

namespace farandole::pipeline {
namespace {

// From a rank's first action to its last: what is outside of it the step before and the next one can fill.
double span(const RankTimeline& rank) { return rank.actions.back().end - rank.actions.front().start; }

TEST(ZeroBubble, H1DelaysTheWeightsOfARankByItsNumber) {
  const Plan plan = *makeZbH1({3, 3, 4, false});
  EXPECT_EQ(rankText(plan, 0), "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3");
  EXPECT_EQ(rankText(plan, 2), "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3");
}

TEST(ZeroBubble, H2WarmsUpTwiceAsLong) {
  const Plan plan = *makeZbH2({2, 2, 4, false});
  EXPECT_EQ(rankText(plan, 0), "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3");
  EXPECT_EQ(rankText(plan, 1), "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3");
}

TEST(ZeroBubble, InterleavedEqualsTorch) {
  EXPECT_EQ(*makeInterleavedZeroBubble({2, 4, 4, false}), goldenSchedule("interleavedzerobubble_p2_m4.csv"));
  EXPECT_EQ(*makeInterleavedZeroBubble({2, 6, 6, false}), goldenSchedule("interleavedzerobubble_p2_m6.csv"));
  EXPECT_EQ(*makeInterleavedZeroBubble({4, 8, 8, false}), goldenSchedule("interleavedzerobubble_p4_m8.csv"));
  EXPECT_EQ(*makeZbH1({4, 4, 4, false}), goldenSchedule("interleavedzerobubble_p4_m4.csv"));
}

TEST(ZeroBubble, H1SavesTheWeightsPartOfTheBubbleWithoutMoreMemoryThan1F1B) {
  checkSchedule("ZB-H1", {}, [](const ScheduleOptions& options, const Plan&, const SimulationResult& run) {
    EXPECT_DOUBLE_EQ(run.makespan, 3.0 * options.numMicrobatches + options.numRanks - 1);
    for (const RankTimeline& rank : run.ranks) EXPECT_EQ(rank.peakLiveActivations, options.numRanks);
  });
}

TEST(ZeroBubble, H2LeavesNoRankWaitingBetweenItsFirstAndItsLastAction) {
  checkSchedule("ZB-H2", {}, [](const ScheduleOptions& options, const Plan&, const SimulationResult& run) {
    const std::int32_t most = 2 * options.numRanks - 1;
    for (const RankTimeline& rank : run.ranks) {
      EXPECT_EQ(rank.peakLiveActivations, std::min(options.numMicrobatches, most));
      if (options.numMicrobatches >= most) {
        EXPECT_DOUBLE_EQ(span(rank), 3.0 * options.numMicrobatches);
      }
    }
  });
}

TEST(ZeroBubble, InterleavedSavesTheSameWithMoreStagesOnARank) {
  checkSchedule("InterleavedZeroBubble", {1, 4},
                [](const ScheduleOptions& options, const Plan&, const SimulationResult& run) {
                  const std::int32_t v = options.numStages / options.numRanks;
                  EXPECT_DOUBLE_EQ(run.makespan, 3.0 * options.numMicrobatches * v + options.numRanks - 1);
                  if (options.numMicrobatches % options.numRanks != 0) return;
                  for (const RankTimeline& rank : run.ranks) {
                    EXPECT_EQ(rank.peakLiveActivations, options.numRanks * v);
                  }
                });
}

TEST(ZeroBubble, ForwardOnlyHasNoBackward) {
  EXPECT_EQ(rankText(*makeZbH1({2, 2, 2, true}), 1), "1F0 1F1");
  EXPECT_EQ(rankText(*makeInterleavedZeroBubble({2, 4, 2, true}), 0), "0F0 0F1 2F0 2F1");
}

TEST(ZeroBubble, RefusesWhatItCannotRun) {
  EXPECT_EQ(makeZbH1({2, 4, 4, false}).status().toString(),
            "schedule ZB-H1: numStages is 4; expected one per rank, numRanks = 2");
  EXPECT_EQ(makeZbH2({2, 2, 0, false}).status().toString(),
            "schedule ZB-H2: numMicrobatches is 0; expected at least 1");
}

}  // namespace
}  // namespace farandole::pipeline
