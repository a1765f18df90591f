#include "pipeline/ir/structure.h"

#include <gtest/gtest.h>

#include "pipeline/ir/validate.h"
#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

std::string refusal(const Plan& plan) { return validate(plan, ChannelModel::kTagged).toString(); }

std::string refusal(std::string_view csv, std::vector<std::int32_t> rankOfStage) {
  return refusal(planOf(csv, std::move(rankOfStage)));
}

TEST(Structure, RefusesABackwardBeforeItsForward) {
  EXPECT_EQ(refusal("0B0,0F0\n", {0}),
            "rank 0, step 0 (0B0): needs 0F0, which comes only in step 1; expected it before");
}

TEST(Structure, RefusesAStageOnARankThatDoesNotOwnIt) {
  EXPECT_EQ(refusal("0F0,0B0\n0F1,0B1\n", {0}),
            "rank 1, step 0 (0F1): stage 0 belongs to rank 0; expected its actions there");
}

TEST(Structure, RefusesWhatIsOutOfRange) {
  EXPECT_EQ(refusal("0F0,7F0\n", {0}), "rank 0, step 1 (7F0): stage 7 is out of range; expected 0 to 0");
  Plan plan = planOf("0F0,0F1\n");
  plan.numMicrobatches = 1;
  EXPECT_EQ(refusal(plan), "rank 0, step 1 (0F1): microbatch 1 is out of range; expected 0 to 0");
  EXPECT_EQ(refusal("0F0\n", {3}), "rankOfStage places stage 0 on rank 3; expected 0 to 0");
}

TEST(Structure, RefusesEmptyFrames) {
  EXPECT_EQ(refusal(Plan{}), "numStages is 0; expected at least 1");
  EXPECT_EQ(refusal(Plan{1, 0, {0}, {{}}}), "numMicrobatches is 0; expected at least 1");
  EXPECT_EQ(refusal(Plan{2, 1, {0}, {{}}}), "rankOfStage has 1 entries; expected one per stage, 2");
}

TEST(Structure, RefusesAMissingForwardEvenOfBillions) {
  EXPECT_EQ(refusal("0F0,0F2\n", {0}),
            "stage 0, microbatch 1: the forward is missing; expected every stage to run every microbatch");
  EXPECT_EQ(refusal("0F0,0F1000000000\n", {0}),
            "stage 0, microbatch 1: the forward is missing; expected every stage to run every microbatch");
}

TEST(Structure, RefusesADuplicate) {
  EXPECT_EQ(refusal("0F0,0F0,0B0\n", {0}), "rank 0, step 1 (0F0): 0F0 is already in step 0; expected it once");
}

TEST(Structure, RefusesAMissingW) {
  EXPECT_EQ(refusal("0F0,0I0\n", {0}),
            "0W0 is missing on rank 0; expected it because 0I0 leaves the weight gradients to it");
  EXPECT_EQ(refusal("0F0,0W0\n", {0}), "0I0 is missing on rank 0; expected it because 0W0 completes it");
}

TEST(Structure, RefusesBTogetherWithIOrW) {
  EXPECT_EQ(refusal("0F0,0B0,0I0,0W0\n", {0}),
            "rank 0, step 2 (0I0): 0B0 in step 1 already does this; expected either B or both I and W");
  EXPECT_EQ(refusal("0F0,0B0,0W0\n", {0}),
            "rank 0, step 2 (0W0): 0B0 in step 1 already does this; expected either B or both I and W");
}

TEST(Structure, RefusesAMissingBackwardWhenOthersAreThere) {
  EXPECT_EQ(refusal("0F0,0F1,0B1\n", {0}),
            "0B0 is missing on rank 0; expected it because other backwards are in the plan");
}

TEST(Structure, AcceptsAPlanOfForwardsAlone) { EXPECT_EQ(refusal("0F0,0F1,1F0,1F1\n", {0, 0}), "ok"); }

TEST(Structure, RefusesWBeforeI) {
  EXPECT_EQ(refusal("0F0,0W0,0I0\n", {0}),
            "rank 0, step 1 (0W0): needs 0I0, which comes only in step 2; expected it before");
}

TEST(Structure, RefusesStagesOfOneRankInTheWrongOrder) {
  EXPECT_EQ(refusal("1F0,0F0\n", {0, 0}),
            "rank 0, step 0 (1F0): needs 0F0, which comes only in step 1; expected it before");
  EXPECT_EQ(refusal("0F0,1F0,0B0,1B0\n", {0, 0}),
            "rank 0, step 2 (0B0): needs 1B0, which comes only in step 3; expected it before");
  EXPECT_EQ(refusal("0F0,1F0,0B0,1I0,1W0\n", {0, 0}),
            "rank 0, step 2 (0B0): needs 1I0, which comes only in step 3; expected it before");
}

TEST(Structure, PartsOfAnOverlapCannotFeedEachOther) {
  EXPECT_NE(refusal("0F0,1F0,(1B0;0B0)OVERLAP_F_B\n", {0, 0}).find("needs 1B0"), std::string::npos);
}

TEST(Structure, RefusesMessagesThatAreMissing) {
  EXPECT_EQ(refusal("0F0\n1F0\n", {0, 1}),
            "1RECV_F0 is missing on rank 1; expected it because 1F0 consumes what it brings");
  EXPECT_EQ(refusal("0F0\n1RECV_F0,1F0\n", {0, 1}),
            "0SEND_F0 is missing on rank 0; expected it because 1RECV_F0 of rank 1, step 0 needs its other end");
}

TEST(Structure, RefusesMessagesInTheWrongPlace) {
  EXPECT_EQ(refusal("0SEND_F0,0F0\n1RECV_F0,1F0\n", {0, 1}),
            "rank 0, step 0 (0SEND_F0): needs 0F0, which comes only in step 1; expected it before");
  EXPECT_EQ(refusal("0F0,0SEND_F0\n1F0,1RECV_F0\n", {0, 1}),
            "rank 1, step 0 (1F0): needs 1RECV_F0, which comes only in step 1; expected it before");
  EXPECT_EQ(refusal("0F0,1F0,0SEND_F0\n", {0, 0}),
            "rank 0, step 2 (0SEND_F0): 0SEND_F0 has no other rank to talk to; expected messages only between "
            "neighbouring stages on different ranks");
  EXPECT_NE(refusal("0F0,0SEND_B0\n", {0}).find("has no other rank to talk to"), std::string::npos);
  EXPECT_EQ(refusal("0F0,0SEND_F0,0RECV_B0\n1RECV_F0,1F0,1SEND_B0\n", {0, 1}),
            "rank 0, step 2 (0RECV_B0): sends a gradient in a plan that has no backward");
}

TEST(Structure, RefusesMessagesOverEdgesThatAreNotThere) {
  constexpr std::string_view kSkips = "0F0,0SEND_F0>2\n1F0\n2RECV_F0<0,2F0\n";
  EXPECT_NE(refusal(kSkips, {0, 1, 2}).find("0SEND_F0>2 has no other rank to talk to"), std::string::npos);
  Plan plan = planOf(kSkips);
  plan.edges = {{0, 2}};
  EXPECT_EQ(refusal(plan), "ok");
  plan.edges = {{0, 1}};
  EXPECT_NE(refusal(plan).find("0SEND_F0>2 has no other rank to talk to"), std::string::npos);
  plan.edges = {{0, 2}, {1, 2}};
  EXPECT_EQ(refusal(plan), "2RECV_F0 is missing on rank 2; expected it because 2F0 consumes what it brings");
  plan.ranks[0][1].other = 1;
  EXPECT_EQ(
      refusal(plan),
      "rank 0, step 1 (0SEND_F0>1): 0SEND_F0>1 names stage 1, which is the one that is meant where none is named; "
      "expected no name");
  plan.ranks[0][1].other = 3;
  EXPECT_NE(refusal(plan).find("0SEND_F0>3 has no other rank to talk to"), std::string::npos);
  plan.ranks[0][0].other = 2;
  EXPECT_NE(refusal(plan).find("stage 2 given as the other one; expected it of sends and receives"), std::string::npos);
}

TEST(Structure, AStageNeedsAllThatLeadToItAndTheGradientsOfAllThatItLeadsTo) {
  Plan plan = planOf("0F0,2F0,1F0,2B0,1B0,0B0\n");
  plan.edges = {{0, 1}, {0, 2}};
  EXPECT_EQ(refusal(plan), "ok");
  plan.edges = {{0, 2}, {1, 2}};
  EXPECT_EQ(refusal(plan), "rank 0, step 1 (2F0): needs 1F0, which comes only in step 2; expected it before");
  plan = planOf("0F0,1F0,2F0,1B0,0B0,2B0\n");
  plan.edges = {{0, 1}, {0, 2}};
  EXPECT_EQ(refusal(plan), "rank 0, step 4 (0B0): needs 2B0, which comes only in step 5; expected it before");
}

TEST(Structure, AStageRunsItsOwnMicrobatchesOnly) {
  Plan plan = planOf("0F0,0F1,0B0,0B1,0REDUCE_GRAD\n1F2,1B2,1REDUCE_GRAD\n");
  plan.edges.emplace();
  EXPECT_EQ(refusal(plan),
            "stage 0, microbatch 2: the forward is missing; expected every stage to run every microbatch");
  plan.microbatchesOfStage = {{0, 2}, {2, 3}};
  EXPECT_EQ(refusal(plan), "ok");
  plan.microbatchesOfStage = {{0, 2}, {1, 3}};
  EXPECT_EQ(refusal(plan),
            "stage 1, microbatch 1: the forward is missing; expected every stage to run every microbatch of its own");
  plan.microbatchesOfStage = {{0, 1}, {2, 3}};
  EXPECT_EQ(refusal(plan), "rank 0, step 1 (0F1): microbatch 1 is not the stage's; expected 0 to 0");
  plan.microbatchesOfStage = {{0, 2}, {2, 2}};
  EXPECT_EQ(refusal(plan), "microbatchesOfStage has 2 to before 2 for stage 1; expected at least one of 0 to 2");
  plan.microbatchesOfStage = {{0, 2}};
  EXPECT_EQ(refusal(plan), "microbatchesOfStage has 1 entries; expected none, or one per stage, 2");
}

TEST(Structure, RefusesMalformedComposites) {
  Plan plan = planOf("0F0\n");
  plan.ranks[0].push_back({kNoStage, ActionKind::kBatchP2p, kNoMicrobatch, {}});
  EXPECT_NE(refusal(plan).find("it has no parts"), std::string::npos);
  EXPECT_NE(refusal("(0F0;0SEND_F0)OVERLAP_F_B\n1RECV_F0,1F0\n", {0, 1}).find("part 0SEND_F0 does not belong"),
            std::string::npos);
  EXPECT_EQ(refusal("0F0,0SEND_F0\n(1RECV_F0;1SEND_F0)BATCH_P2P,1F0\n2RECV_F0,2F0\n", {0, 1, 2}),
            "rank 1, step 0 ((1RECV_F0;1SEND_F0)BATCH_P2P): 1SEND_F0 is with rank 2, the parts before with 0; expected "
            "one peer per batch");
}

TEST(Structure, RefusesWaitsForSendsThatWereNotPosted) {
  EXPECT_EQ(refusal("0F0,0WAIT_SEND0,0SEND_F0\n1RECV_F0,1F0\n", {0, 1}),
            "rank 0, step 1 (0WAIT_SEND0): no such send was posted before it; expected the send first");
  EXPECT_NE(refusal("0F0,0SEND_F0,0WAIT_SEND_B0\n1RECV_F0,1F0\n", {0, 1}).find("no such send"), std::string::npos);
}

TEST(Structure, RefusesReductionsThatMissGradients) {
  EXPECT_EQ(refusal("0F0,0F1,0B0,0REDUCE_GRAD,0B1\n", {0}),
            "rank 0, step 3 (0REDUCE_GRAD): 1 microbatches still add to the gradients after it; expected it after the "
            "stage's last B or W");
  EXPECT_NE(refusal("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD\n", {0}).find("a second reduction"), std::string::npos);
  EXPECT_NE(refusal("0F0,0B0,0WAIT_REDUCE_GRAD\n", {0}).find("no REDUCE_GRAD"), std::string::npos);
}

}  // namespace
}  // namespace farandole::pipeline
