// The schedules whose stages form a V.
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "pipeline/schedules/building_block.h"
#include "pipeline/schedules/controllable_memory.h"
#include "pipeline/schedules/dual_pipe_v.h"
#include "pipeline/schedules/registry.h"
#include "pipeline/schedules/squeeze.h"
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
    EXPECT_LE(run.makespan, 6.0 * options.numMicrobatches + 3 * p);
    for (const RankTimeline& rank : run.ranks) EXPECT_LE(rank.peakLiveActivations, p + 2);
  });
}

TEST(ControllableMemory, TheBoundsHoldForEveryNumberOfRanks) {
  for (std::int32_t p = 1; p <= 32; ++p) {
    const ScheduleOptions options{p, 2 * p, 2 * p + 1, false};
    const SimulationCosts costs{std::vector<StageCost>(2 * p, {1, 2, 1, 1}), 0};
    const auto least = simulate(*makeVMin(options), costs);
    const auto half = simulate(*makeVHalf(options), costs);
    EXPECT_LE(least->makespan, 6.0 * options.numMicrobatches + std::max(0, 4 * p - 3)) << "V-Min p " << p;
    EXPECT_LE(half->makespan, 6.0 * options.numMicrobatches + 3 * p) << "V-Half p " << p;
    for (std::int32_t rank = 0; rank < p; ++rank) {
      EXPECT_LE(least->ranks[rank].peakLiveActivations, (2 * p + 2) / 3 + 2) << "V-Min p " << p;
      EXPECT_LE(half->ranks[rank].peakLiveActivations, p + 2) << "V-Half p " << p;
    }
  }
}

// Of the authors' own scheduler, see make_v_golden.py: schedule, ranks, microbatches, length of a step, most held.
TEST(ControllableMemory, IsAsFastAsTheAuthorsWithinTwoActionsAndHoldsNoMore) {
  std::istringstream lines(readGolden("v_schedules.csv"));
  int seen = 0;
  for (std::string line; std::getline(lines, line); ++seen) {
    std::replace(line.begin(), line.end(), ',', ' ');
    std::istringstream values(line);
    std::string name;
    std::int32_t p = 0, m = 0, length = 0, most = 0;
    ASSERT_TRUE(values >> name >> p >> m >> length >> most) << line;
    const auto run = simulate(*makePlan(name, {p, 2 * p, m, false}), {std::vector<StageCost>(2 * p, {1, 2, 1, 1}), 0});
    ASSERT_TRUE(run) << run.status().toString();
    EXPECT_LE(run->makespan, length + 2) << line;
    std::int32_t held = 0;
    for (const RankTimeline& rank : run->ranks) held = std::max(held, rank.peakLiveActivations);
    EXPECT_LE(held, most) << line;
  }
  EXPECT_EQ(seen, 34);
}

TEST(ControllableMemory, EqualsWhatItWas) {
  EXPECT_EQ(makeVMin({2, 4, 4, false})->ranks, goldenSchedule("vmin_p2_m4.csv").ranks);
  EXPECT_EQ(makeVMin({4, 8, 8, false})->ranks, goldenSchedule("vmin_p4_m8.csv").ranks);
  EXPECT_EQ(makeVHalf({2, 4, 4, false})->ranks, goldenSchedule("vhalf_p2_m4.csv").ranks);
  EXPECT_EQ(makeVHalf({4, 8, 8, false})->ranks, goldenSchedule("vhalf_p4_m8.csv").ranks);
}

TEST(ControllableMemory, IsNoSlowerThanTheBlockRepeatedNorHoldsMore) {
  for (const BuildingBlock::Pace pace : {BuildingBlock::Pace{1, 1, 1, 1}, BuildingBlock::Pace{2, 1, 2, 1}}) {
    for (const std::int32_t p : {1, 2, 3, 5, 8, 13}) {
      for (const std::int32_t m : {1, 2, p, 2 * p + 1, 5 * p}) {
        const auto block = BuildingBlock::make(pace, p);
        const ScheduleOptions options{p, 2 * p, m, false};
        const SimulationCosts costs{std::vector<StageCost>(2 * p, {1, 2, 1, 1}), 0};
        const auto plain = simulate(repeat(*block, options), costs);
        const auto squeezed = simulate(squeeze(*block, options), costs);
        ASSERT_TRUE(squeezed) << squeezed.status().toString();
        EXPECT_LE(squeezed->makespan, plain->makespan) << "p " << p << " m " << m;
        std::int32_t before = 0, after = 0;
        for (std::int32_t rank = 0; rank < p; ++rank) {
          before = std::max(before, plain->ranks[rank].peakLiveActivations);
          after = std::max(after, squeezed->ranks[rank].peakLiveActivations);
        }
        EXPECT_LE(after, before) << "p " << p << " m " << m;
      }
    }
  }
}

// The patterns as they are published (Qi et al. 2024, and the authors' scheduler): when F, F, I and I of the first
// microbatch begin on a rank.
TEST(BuildingBlock, IsThePublishedOne) {
  for (std::int32_t p = 2; p <= 64; ++p) {
    const auto least = BuildingBlock::make({1, 1, 1, 1}, p);
    const auto half = BuildingBlock::make({2, 1, 2, 1}, p);
    const std::int32_t restOfLeast = p % 3 == 0 ? 2 : 0;
    const std::int32_t restOfHalf = p % 2 == 0 ? 3 : 0;
    for (std::int32_t i = 0; i < p; ++i) {
      const auto times = [i](const BuildingBlock& block) {
        const std::vector<BuildingBlock::Slot> slots = block.slotsOf(i);
        return std::vector<std::int32_t>{slots[0].time, slots[1].time, slots[2].time, slots[3].time};
      };
      EXPECT_EQ(times(*least),
                (std::vector<std::int32_t>{i, 2 * p - i - 1, 2 * p + restOfLeast + i, 4 * p + restOfLeast - i - 1}))
          << "V-Min, rank " << i << " of " << p;
      EXPECT_EQ(times(*half), (std::vector<std::int32_t>{2 * i, 3 * p - i - 2, 3 * p + restOfHalf + 2 * i - 1,
                                                         6 * p + restOfHalf - i - 2}))
          << "V-Half, rank " << i << " of " << p;
    }
  }
}

TEST(BuildingBlock, LeavesNoRankWithTwoThingsAtATime) {
  for (const BuildingBlock::Pace pace : {BuildingBlock::Pace{1, 1, 1, 1}, BuildingBlock::Pace{2, 1, 2, 1}}) {
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
