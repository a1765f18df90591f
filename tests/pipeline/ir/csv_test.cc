#include "pipeline/ir/csv.h"

#include <gtest/gtest.h>

#include <random>

#include "pipeline/ir/validate.h"
#include "pipeline/passes/lower.h"
#include "pipeline/schedules/registry.h"
#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

std::string errorOf(const Result<Plan>& plan) { return plan ? "parsed" : plan.status().toString(); }

// A golden file without idle slots and with plain line ends.
std::string compact(const std::string& text) {
  std::string result;
  for (char c : text) {
    const bool atStart = result.empty() || result.back() == '\n';
    if (c == '\r' || (c == ',' && (atStart || result.back() == ','))) continue;
    if (c == '\n' && !result.empty() && result.back() == ',') result.pop_back();
    result += c;
  }
  return result;
}

TEST(Csv, ReadsWhatTorchWroteAndWritesItBackWithoutTheIdleSlots) {
  std::vector<std::string> names = goldenPlansWithMessages();
  for (const std::string& name : goldenPlansWithMessages()) {
    std::string computeOnly = name;
    computeOnly.replace(name.find("_comms"), 6, "");
    names.push_back(computeOnly);
  }
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const std::string golden = readGolden(name);
    const Plan plan = planOf(golden);
    EXPECT_EQ(toCsv(plan), compact(golden));
    EXPECT_EQ(planOf(toCsv(plan)), plan);
  }
}

TEST(Csv, PlacesTheStagesWhereTheyAreComputed) {
  const Plan plan = planOf(readGolden("zbv_p2_m4.csv"));
  EXPECT_EQ(plan.numStages, 4);
  EXPECT_EQ(plan.numMicrobatches, 4);
  EXPECT_EQ(plan.rankOfStage, (std::vector<std::int32_t>{0, 1, 1, 0}));
}

TEST(Csv, TakesThePlacementThatIsGiven) {
  const Plan plan = planOf("0F0\n1F0,2F0\n", {0, 1, 1});
  EXPECT_EQ(plan.numStages, 3);
  EXPECT_EQ(plan.rankOfStage, (std::vector<std::int32_t>{0, 1, 1}));
}

TEST(Csv, KeepsRanksThatDoNothing) {
  const Plan plan = planOf("0F0\n\n\"\"\n");
  ASSERT_EQ(plan.numRanks(), 3);
  EXPECT_TRUE(plan.ranks[1].empty());
  EXPECT_TRUE(plan.ranks[2].empty());
  EXPECT_EQ(planOf(toCsv(plan)), plan);
}

TEST(Csv, TheLastLineNeedsNoLineEnd) { EXPECT_EQ(planOf("0F0,0B0"), planOf("0F0,0B0\r\n")); }

TEST(Csv, BatchesSurviveTheRoundTrip) {
  const Plan plan = loweredPlan("1F1B", 4, 8);
  EXPECT_NE(toCsv(plan).find("(1SEND_F2;1RECV_B0)BATCH_P2P"), std::string::npos) << toCsv(plan);
  EXPECT_EQ(planOf(toCsv(plan), plan.rankOfStage), plan);
}

TEST(Csv, MessagesThatSkipStagesSurviveTheRoundTrip) {
  ScheduleOptions options{4, 4, 8, false};
  options.edges = {{0, 1}, {1, 2}, {0, 3}, {2, 3}};
  const Plan plan = *lower(*makePlan("1F1B", options), ChannelModel::kFifoPerEdge);
  EXPECT_NE(toCsv(plan).find(",0SEND_F0>3,"), std::string::npos) << toCsv(plan);
  EXPECT_TRUE(toCsv(plan).ends_with("\nedges,0>1,1>2,0>3,2>3\n")) << toCsv(plan);
  Plan back = planOf(toCsv(plan), plan.rankOfStage);
  EXPECT_EQ(back, plan);
  back.edges.reset();
  EXPECT_FALSE(validate(back, ChannelModel::kTagged)) << "as a chain";
}

TEST(Csv, EveryScheduleOnAnyGraphSurvivesTheRoundTrip) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  int numRanges = 0;
  for (int i = 0; i < 40; ++i) {
    for (const std::string_view name : scheduleNames()) {
      const bool hasCopies = name == "DualPipe";
      const auto p = static_cast<std::int32_t>(hasCopies ? 2 : 1 + random() % 4);
      const auto v = static_cast<std::int32_t>(hasCopies ? 2 : 1 + random() % 3);
      ScheduleOptions options{p, p * v, static_cast<std::int32_t>(hasCopies ? 4 : 1 + random() % 9), false};
      if (random() % 4 != 0) options.edges = randomEdges(hasCopies ? p : p * v, random);
      const Result<Plan> made = makePlan(name, options);
      if (!made) continue;
      for (const Plan& plan : {*made, *lower(*made, ChannelModel::kTagged)}) {
        ASSERT_EQ(planOf(toCsv(plan)), plan) << toCsv(plan);
      }
      numRanges += made->microbatchesOfStage.empty() ? 0 : 1;
    }
  }
  EXPECT_GT(numRanges, 5);
}

TEST(Csv, ReadsTheGraphBehindTheRanks) {
  const Plan plan = planOf("0F0\n1F1\nmicrobatches,0:1, 1:2\r\nedges\n\n");
  EXPECT_EQ(plan.numRanks(), 2) << "a blank line at the end is none";
  EXPECT_EQ(plan.edges, std::vector<StageEdge>());
  EXPECT_EQ(plan.microbatchesOfStage, (std::vector<MicrobatchRange>{{0, 1}, {1, 2}}));
}

TEST(Csv, RefusesAGraphThatIsNone) {
  EXPECT_EQ(errorOf(fromCsv("0F0\nedges,0>1,0-3\n")),
            "line 2, column 11: '0-3' among edges; expected two numbers like '0>4'");
  for (const std::string cell : {"0>", ">1", "0>1>2", "0>1x", "0:1", "0", "9999999999>1"}) {
    EXPECT_NE(errorOf(fromCsv("0F0\nedges," + cell + "\n")).find("'" + cell + "' among edges"), std::string::npos);
  }
  EXPECT_EQ(errorOf(fromCsv("0F0\nmicrobatches,0>1\n")),
            "line 2, column 14: '0>1' among microbatches; expected two numbers like '0:4'");
  EXPECT_EQ(errorOf(fromCsv("0F0\nedges\nedges\n")), "line 3: edges a second time; expected them once");
  EXPECT_EQ(errorOf(fromCsv("0F0\nedges\n1F0\n")),
            "line 3: actions behind the graph of stages; expected the lines of the ranks first");
}

TEST(Csv, ErrorsNameLineAndColumn) {
  EXPECT_EQ(errorOf(fromCsv("0F0,0B0\n1F0, 1Q0\n")),
            "line 2, column 5: action '1Q0': unknown kind 'Q'; expected [stage][kind][microbatch] like '2F0', or "
            "'(2F0;3B1)OVERLAP_F_B'");
}

TEST(Csv, RefusesAStageThatTwoRanksCompute) {
  EXPECT_EQ(errorOf(fromCsv("0F0,0B0\n0F1,0B1\n")),
            "stage 0 is computed on line 1 and on line 2 (0F1); expected one rank per stage");
}

TEST(Csv, RefusesStagesThatAreMissing) {
  EXPECT_NE(errorOf(fromCsv("0F0,0F1,2F0,2F1\n")).find("stage 1 is computed on no line"), std::string::npos);
  EXPECT_NE(errorOf(fromCsv("0F0,1000000000F0\n")).find("stage 1000000000 of a plan of only 2 actions"),
            std::string::npos);
}

}  // namespace
}  // namespace farandole::pipeline
