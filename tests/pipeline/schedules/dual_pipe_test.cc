#include "pipeline/schedules/dual_pipe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/simulate.h"
#include "pipeline/ir/text.h"
#include "pipeline/passes/lower.h"
#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

std::string errorOf(const ScheduleOptions& options) { return makeDualPipe(options).status().toString(); }

TEST(DualPipe, EqualsTheAuthors) {
  for (const auto& [p, m] : {std::pair{2, 4}, {4, 8}, {4, 10}, {6, 12}, {8, 20}}) {
    const std::string name = "dualpipe_p" + std::to_string(p) + "_m" + std::to_string(m) + ".csv";
    EXPECT_EQ(makeDualPipe({p, 2 * p, m, false})->ranks, planOf(readGolden(name)).ranks) << name;
  }
}

TEST(DualPipe, HasTheModelTwiceInOppositeDirections) {
  const Plan plan = *makeDualPipe({4, 8, 10, false});
  EXPECT_EQ(plan.rankOfStage, (std::vector<std::int32_t>{0, 1, 2, 3, 3, 2, 1, 0}));
  EXPECT_EQ(*plan.edges, (std::vector<StageEdge>{{0, 1}, {1, 2}, {2, 3}, {4, 5}, {5, 6}, {6, 7}}));
  EXPECT_EQ(plan.microbatchesOf(3), (MicrobatchRange{0, 5}));
  EXPECT_EQ(plan.microbatchesOf(4), (MicrobatchRange{5, 10}));
}

TEST(DualPipe, TakesAsManyOfEachStepAsPublished) {
  const std::int32_t p = 8;
  const std::int32_t m = 20;
  const Plan plan = *makeDualPipe({p, 2 * p, m, false});
  for (std::int32_t r = 0; r < p; ++r) {
    const std::int32_t half = std::min(r, p - 1 - r);
    std::map<std::string, std::int32_t> counts;
    for (const Action& action : plan.ranks[r])
      ++counts[action.parts.empty() ? std::string(toString(action.kind)) : "&"];
    const std::int32_t left = p / 2 - half - 1;  // ranks on the way to the middle
    const std::int32_t pairs = m / 2 - p + half + 1;
    const bool isMiddle = left == 0;
    EXPECT_EQ(counts["&"], 2 * pairs + left - (isMiddle ? 1 : 0)) << "rank " << r;
    EXPECT_EQ(counts["F"], 2 * left + 2 * (half + 1) + left + (isMiddle ? 1 : 0)) << "rank " << r;
    EXPECT_EQ(counts["I"], 2 * left + half + 1) << "rank " << r;
    EXPECT_EQ(counts["W"], counts["I"]) << "rank " << r;
    EXPECT_EQ(counts["B"] + counts["I"] + counts["&"], m) << "rank " << r;
  }
}

void forAllCounts(const std::function<void(const ScheduleOptions&, const Plan&)>& check) {
  for (const std::int32_t p : {2, 4, 6, 8, 16}) {
    for (std::int32_t m = 2 * p; m <= 6 * p; m += p <= 4 ? 2 : p) {
      SCOPED_TRACE("p " + std::to_string(p) + " m " + std::to_string(m));
      const ScheduleOptions options{p, 2 * p, m, false};
      check(options, *makeDualPipe(options));
      ASSERT_FALSE(::testing::Test::HasFailure());
    }
  }
}

TEST(DualPipe, WaitsAsLongAsPublished) {
  forAllCounts([](const ScheduleOptions& options, const Plan& plan) {
    // F, I and W take 1; a pair as long as its parts, or less where these hide a part of each other.
    for (const double pair : {3.0, 2.5, 2.0}) {
      const auto cost = [&](std::int32_t, const Action& action) {
        if (action.kind == ActionKind::kOverlapFB) return pair;
        return action.kind == ActionKind::kBackward ? 2.0 : 1.0;
      };
      const Result<SimulationResult> run = simulate(plan, cost, 0);
      ASSERT_TRUE(run) << run.status().toString();
      double longest = 0;
      for (const RankTimeline& rank : run->ranks) longest = std::max(longest, run->makespan - rank.busy);
      // (p / 2 - 1) (F&B + B - 3 W)
      const std::int32_t numTimes = options.numRanks / 2 - 1;
      EXPECT_DOUBLE_EQ(longest, numTimes * (pair + 2 - 3)) << "F&B " << pair;
    }
  });
}

TEST(DualPipe, ARankHoldsOneMoreThanThereAreRanks) {
  forAllCounts([](const ScheduleOptions& options, const Plan& plan) {
    const std::vector<StageCost> costs(static_cast<std::size_t>(options.numStages), {1, 2, 1, 1});
    const Result<SimulationResult> run = simulate(plan, {costs, 0});
    ASSERT_TRUE(run) << run.status().toString();
    for (const RankTimeline& rank : run->ranks) EXPECT_EQ(rank.peakLiveActivations, options.numRanks + 1);
    const Result<Plan> lowered = lower(plan, ChannelModel::kFifoPerEdge);
    ASSERT_TRUE(lowered) << lowered.status().toString();
    EXPECT_DOUBLE_EQ(simulate(*lowered, {costs, 0})->makespan, run->makespan) << "lowered";
  });
}

TEST(DualPipe, BothCopiesHaveTheGraphThatIsGiven) {
  ScheduleOptions options{4, 8, 8, false};
  options.edges = {{0, 1}, {0, 3}, {1, 2}, {2, 3}};
  const Plan plan = *lower(*makeDualPipe(options), ChannelModel::kFifoPerEdge);
  EXPECT_EQ(*plan.edges, (std::vector<StageEdge>{{0, 1}, {0, 3}, {1, 2}, {2, 3}, {4, 5}, {4, 7}, {5, 6}, {6, 7}}));
  EXPECT_NE(rankText(plan, 0).find("0SEND_F0>3"), std::string::npos);
  EXPECT_NE(rankText(plan, 0).find("7RECV_F4<4"), std::string::npos);
  options.edges = {{0, 1}, {1, 4}};
  EXPECT_EQ(
      errorOf(options),
      "schedule DualPipe: edge 1 -> 4; expected edges of the first copy, stages 0 to 3, for the second one has the "
      "same");
}

TEST(DualPipe, ForwardOnlyHasNoBackward) { EXPECT_EQ(rankText(*makeDualPipe({2, 4, 4, true}), 0), "0F0 3F2 0F1 3F3"); }

TEST(DualPipe, RefusesWhatItCannotRun) {
  EXPECT_EQ(errorOf({3, 6, 8, false}), "schedule DualPipe: numRanks is 3; expected an even number");
  EXPECT_EQ(errorOf({4, 4, 8, false}), "schedule DualPipe: numStages is 4; expected two for each rank, 2 numRanks = 8");
  EXPECT_EQ(errorOf({4, 8, 6, false}),
            "schedule DualPipe: numMicrobatches is 6; expected an even number, at least 2 numRanks = 8");
  EXPECT_EQ(errorOf({4, 8, 9, false}),
            "schedule DualPipe: numMicrobatches is 9; expected an even number, at least 2 numRanks = 8");
}

}  // namespace
}  // namespace farandole::pipeline
