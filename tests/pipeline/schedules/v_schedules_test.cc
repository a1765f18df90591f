// The schedules whose stages form a V.
#include <gtest/gtest.h>

#include <algorithm>

#include "pipeline/schedules/building_block.h"
#include "pipeline/schedules/controllable_memory.h"
#include "pipeline/schedules/dual_pipe_v.h"
#include "pipeline/schedules/zbv.h"
#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/pipeline/schedules/schedule_checks.h"

namespace farandole::pipeline {
namespace {

constexpr Shapes kTwo{2, 2, 1};

TEST(Zbv, EqualsTorch) {
  EXPECT_EQ(makeZbv({2, 4, 4, false})->ranks, goldenSchedule("zbv_p2_m4.csv").ranks);
  EXPECT_EQ(makeZbv({4, 8, 8, false})->ranks, goldenSchedule("zbv_p4_m8.csv").ranks);
  EXPECT_EQ(makeZbv({4, 8, 3, false})->ranks, goldenSchedule("zbv_p4_m3.csv").ranks);
  EXPECT_EQ(makeZbv({2, 4, 4, false})->rankOfStage, (std::vector<std::int32_t>{0, 1, 1, 0}));
}

TEST(Zbv, NoRankWaitsBetweenItsFirstActionAndItsLast) {
  checkSchedule("ZBV", kTwo, [](const ScheduleOptions& options, const Plan&, const SimulationResult& run) {
    const std::int32_t p = options.numRanks;
    for (const RankTimeline& rank : run.ranks) {
      EXPECT_LE(rank.peakLiveActivations, 2 * p);
      if (options.numMicrobatches < 2 * p - 1) continue;
      EXPECT_EQ(rank.peakLiveActivations, 2 * p);
      EXPECT_DOUBLE_EQ(rank.actions.back().end - rank.actions.front().start, 6.0 * options.numMicrobatches);
    }
    if (options.numMicrobatches >= 2 * p - 1) {
      EXPECT_DOUBLE_EQ(run.makespan, 6.0 * options.numMicrobatches + p - 1);
    }
  });
}

TEST(DualPipeV, EqualsTorch) {
  EXPECT_EQ(makeDualPipeV({2, 4, 8, false})->ranks, goldenSchedule("dualpipev_p2_m8.csv").ranks);
  EXPECT_EQ(makeDualPipeV({4, 8, 8, false})->ranks, goldenSchedule("dualpipev_p4_m8.csv").ranks);
}

TEST(DualPipeV, WaitsForThePairsAtTheEndsOnly) {
  checkSchedule("DualPipeV", {2, 2, 2}, [](const ScheduleOptions& options, const Plan&, const SimulationResult& run) {
    const std::int32_t p = options.numRanks;
    // (p - 1) (F&B + B - 3 W)
    EXPECT_DOUBLE_EQ(run.makespan, 6.0 * options.numMicrobatches + 2 * (p - 1));
    for (const RankTimeline& rank : run.ranks) EXPECT_LE(rank.peakLiveActivations, 2 * p + 1);
  });
}

TEST(ControllableMemory, VMinHoldsAThird) {
  checkSchedule("V-Min", kTwo, [](const ScheduleOptions& options, const Plan&, const SimulationResult& run) {
    const std::int32_t p = options.numRanks;
    EXPECT_LE(run.makespan, 6.0 * options.numMicrobatches + std::max(0, 4 * p - 3));
    for (const RankTimeline& rank : run.ranks) EXPECT_LE(rank.peakLiveActivations, (2 * p + 2) / 3 + 2);
  });
}

TEST(ControllableMemory, VHalfHoldsHalf) {
  checkSchedule("V-Half", kTwo, [](const ScheduleOptions& options, const Plan&, const SimulationResult& run) {
    const std::int32_t p = options.numRanks;
    EXPECT_LE(run.makespan, 6.0 * options.numMicrobatches + 3.5 * p);
    for (const RankTimeline& rank : run.ranks) EXPECT_LE(rank.peakLiveActivations, p + 3);
  });
}

TEST(ControllableMemory, TheBoundsHoldForEveryNumberOfRanks) {
  for (std::int32_t p = 1; p <= 32; ++p) {
    const ScheduleOptions options{p, 2 * p, 2 * p + 1, false};
    const SimulationCosts costs{std::vector<StageCost>(2 * p, {1, 2, 1, 1}), 0};
    const auto least = simulate(*makeVMin(options), costs);
    const auto half = simulate(*makeVHalf(options), costs);
    EXPECT_LE(least->makespan, 6.0 * options.numMicrobatches + std::max(0, 4 * p - 3)) << "V-Min p " << p;
    EXPECT_LE(half->makespan, 6.0 * options.numMicrobatches + 3.5 * p) << "V-Half p " << p;
    for (std::int32_t rank = 0; rank < p; ++rank) {
      EXPECT_LE(least->ranks[rank].peakLiveActivations, (2 * p + 2) / 3 + 2) << "V-Min p " << p;
      EXPECT_LE(half->ranks[rank].peakLiveActivations, p + 3) << "V-Half p " << p;
    }
  }
}

TEST(BuildingBlock, LeavesNoRankWithTwoThingsAtATime) {
  for (const BuildingBlock::Pace pace : {BuildingBlock::Pace{1, 1, 1, 1}, BuildingBlock::Pace{1, 2, 1, 2}}) {
    for (std::int32_t p = 1; p <= 64; ++p) {
      const auto block = BuildingBlock::make(pace, p);
      ASSERT_TRUE(block) << "p " << p;
      for (std::int32_t rank = 0; rank < p; ++rank) {
        std::vector<std::int32_t> taken;
        for (const BuildingBlock::Slot& slot : block->slotsOf(rank)) {
          taken.push_back(slot.time % BuildingBlock::kPeriod);
        }
        std::ranges::sort(taken);
        EXPECT_EQ(taken, (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5}));
      }
    }
  }
}

TEST(VSchedules, ForwardOnlyHasNoBackward) {
  for (const auto& make : {makeZbv, makeVMin, makeVHalf}) {
    EXPECT_EQ(rankText(*make({2, 4, 2, true}), 1), "1F0 2F0 1F1 2F1");
  }
  EXPECT_EQ(rankText(*makeDualPipeV({1, 2, 2, true}), 0), "0F0 1F0 0F1 1F1");
}

TEST(VSchedules, RefuseWhatTheyCannotRun) {
  EXPECT_EQ(makeZbv({2, 6, 4, false}).status().toString(),
            "schedule ZBV: numStages is 6; expected two for each rank, 2 numRanks = 4");
  EXPECT_EQ(makeDualPipeV({2, 4, 3, false}).status().toString(),
            "schedule DualPipeV: numMicrobatches is 3; expected at least 2 numRanks = 4");
  EXPECT_EQ(makeVMin({2, 4, 0, false}).status().toString(),
            "schedule V-Min: numMicrobatches is 0; expected at least 1");
}

}  // namespace
}  // namespace farandole::pipeline
