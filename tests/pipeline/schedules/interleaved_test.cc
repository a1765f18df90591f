#include "pipeline/schedules/interleaved.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "pipeline/schedules/none.h"
#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/pipeline/schedules/schedule_checks.h"

namespace farandole::pipeline {
namespace {

TEST(Interleaved, AGroupGoesThroughARanksStagesInTurn) {
  const Plan plan = *makeInterleavedOneFOneB({2, 4, 4, false});
  EXPECT_EQ(rankText(plan, 0), "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3");
  EXPECT_EQ(rankText(plan, 1), "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3");
}

TEST(Interleaved, EqualsTorch) {
  EXPECT_EQ(*makeInterleavedOneFOneB({2, 4, 4, false}), goldenSchedule("interleaved1f1b_p2_m4.csv"));
  EXPECT_EQ(*makeInterleavedOneFOneB({2, 6, 6, false}), goldenSchedule("interleaved1f1b_p2_m6.csv"));
  EXPECT_EQ(*makeInterleavedOneFOneB({4, 4, 4, false}), goldenSchedule("interleaved1f1b_p4_m4.csv"));
  EXPECT_EQ(*makeInterleavedOneFOneB({4, 8, 8, false}), goldenSchedule("interleaved1f1b_p4_m8.csv"));
}

TEST(Interleaved, TakesMTimesVPlusPMinus1SlotsForAnyNumberOfMicrobatches) {
  checkSchedule(
      "Interleaved1F1B", {1, 4}, [](const ScheduleOptions& options, const Plan&, const SimulationResult& run) {
        const std::int32_t p = options.numRanks;
        const std::int32_t v = options.numStages / p;
        const std::int32_t m = options.numMicrobatches;
        EXPECT_DOUBLE_EQ(run.makespan, 3.0 * (m * v + p - 1));
        if (m % p != 0) return;
        for (std::int32_t rank = 0; rank < p; ++rank) {
          EXPECT_EQ(run.ranks[rank].peakLiveActivations, std::min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1));
        }
      });
}

TEST(Interleaved, GroupsAreCutAsMegatronCutsThem) {
  ScheduleOptions options{2, 4, 7, false};
  options.microbatchGroup = 4;
  // 4 and 3: what is left is no fewer than there are ranks.
  EXPECT_EQ(rankText(*makeInterleavedOneFOneB(options), 1).substr(0, 43),
            "1F0 1F1 1F2 1F3 3F0 3B0 3F1 3B1 3F2 3B2 3F3");
  EXPECT_NE(rankText(*makeInterleavedOneFOneB(options), 1).find("1F6"), std::string::npos);
  // 4 and 1 would keep them waiting: 5.
  options.numMicrobatches = 5;
  EXPECT_EQ(rankText(*makeInterleavedOneFOneB(options), 1).substr(0, 27), "1F0 1F1 1F2 1F3 1F4 3F0 3B0");
}

TEST(Interleaved, FewerMicrobatchesThanRanksAndAnyGroupRun) {
  for (std::int32_t p = 1; p <= 6; ++p) {
    for (std::int32_t v = 1; v <= 4; ++v) {
      for (std::int32_t m = 1; m <= 3 * p; ++m) {
        for (std::int32_t group = 0; group <= 2 * p; ++group) {
          if (group > 0 && group < p) continue;
          ScheduleOptions options{p, p * v, m, false};
          options.microbatchGroup = group;
          const auto run = simulate(*makeInterleavedOneFOneB(options),
                                    {std::vector<StageCost>(static_cast<std::size_t>(p) * v, {1, 2, 1, 1}), 0});
          ASSERT_TRUE(run) << "p " << p << " v " << v << " m " << m << " g " << group << " " << run.status().toString();
        }
      }
    }
  }
}

TEST(Interleaved, ForwardOnlyHasNoBackward) {
  EXPECT_EQ(rankText(*makeInterleavedOneFOneB({2, 4, 2, true}), 1), "1F0 1F1 3F0 3F1");
  EXPECT_EQ(rankText(*makeLoopedBfs({2, 4, 3, true}), 0), "0F0 0F1 0F2 2F0 2F1 2F2");
}

TEST(Interleaved, RefusesWhatItCannotRun) {
  EXPECT_EQ(makeInterleavedOneFOneB({4, 6, 4, false}).status().toString(),
            "schedule Interleaved1F1B: numStages is 6; expected as many for every rank, a multiple of numRanks = 4");
  ScheduleOptions options{4, 8, 4, false};
  options.microbatchGroup = -1;
  EXPECT_EQ(makeInterleavedOneFOneB(options).status().toString(),
            "schedule Interleaved1F1B: microbatchGroup is -1; expected 0 (numRanks), or numRanks = 4 and more");
  options.microbatchGroup = 3;
  EXPECT_EQ(makeInterleavedOneFOneB(options).status().toString(),
            "schedule Interleaved1F1B: microbatchGroup is 3; expected 0 (numRanks), or numRanks = 4 and more");
  EXPECT_EQ(makeLoopedBfs({2, 4, 0, false}).status().toString(),
            "schedule LoopedBFS: numMicrobatches is 0; expected at least 1");
}

TEST(LoopedBfs, EqualsTorch) {
  EXPECT_EQ(*makeLoopedBfs({2, 4, 4, false}), goldenSchedule("loopedbfs_p2_m4.csv"));
  EXPECT_EQ(*makeLoopedBfs({2, 6, 6, false}), goldenSchedule("loopedbfs_p2_m6.csv"));
  EXPECT_EQ(*makeLoopedBfs({4, 4, 4, false}), goldenSchedule("loopedbfs_p4_m4.csv"));
  EXPECT_EQ(*makeLoopedBfs({4, 8, 8, false}), goldenSchedule("loopedbfs_p4_m8.csv"));
}

TEST(LoopedBfs, TakesAsLongAsInterleavedAndHoldsEverything) {
  checkSchedule("LoopedBFS", {1, 4}, [](const ScheduleOptions& options, const Plan&, const SimulationResult& run) {
    const std::int32_t v = options.numStages / options.numRanks;
    EXPECT_DOUBLE_EQ(run.makespan, 3.0 * (options.numMicrobatches * v + options.numRanks - 1));
    for (const RankTimeline& rank : run.ranks) EXPECT_EQ(rank.peakLiveActivations, options.numMicrobatches * v);
  });
}

TEST(None, OneMicrobatchAfterTheOther) {
  EXPECT_EQ(rankText(*makeNone({1, 2, 2, false}), 0), "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1");
  EXPECT_EQ(rankText(*makeNone({2, 2, 2, true}), 1), "1F0 1F1");
  checkSchedule("none", {1, 4}, [](const ScheduleOptions& options, const Plan&, const SimulationResult& run) {
    EXPECT_DOUBLE_EQ(run.makespan, 3.0 * options.numMicrobatches * options.numStages);
    for (const RankTimeline& rank : run.ranks) {
      EXPECT_EQ(rank.peakLiveActivations, options.numStages / options.numRanks);
    }
  });
}

}  // namespace
}  // namespace farandole::pipeline
