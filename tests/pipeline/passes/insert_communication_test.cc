#include "pipeline/passes/insert_communication.h"

#include <gtest/gtest.h>

#include "pipeline/ir/validate.h"
#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

TEST(InsertCommunication, SendsFollowWhatMakesThemAndReceivesPrecedeWhatNeedsThem) {
  const Plan plan = *insertCommunication(computePlan("GPipe", 2, 2));
  EXPECT_EQ(rankText(plan, 0), "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1");
  EXPECT_EQ(rankText(plan, 1), "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1");
}

TEST(InsertCommunication, WhereRanksExchangeBothListTheLowerRanksMessageFirst) {
  const Plan plan = *insertCommunication(computePlan("1F1B", 2, 3));
  EXPECT_EQ(rankText(plan, 0), "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2");
  EXPECT_EQ(rankText(plan, 1), "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2");
}

TEST(InsertCommunication, NothingIsSentWithinARank) {
  const Plan plan = *insertCommunication(planOf("0F0,1F0,1B0,0B0\n"));
  EXPECT_EQ(rankText(plan, 0), "0F0 1F0 1B0 0B0");
  EXPECT_EQ(rankText(*insertCommunication(planOf("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")), 1),
            "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0");
}

TEST(InsertCommunication, KeepsWhatIsNotCompute) {
  const Plan plan = *insertCommunication(planOf("0UNSHARD,0F0,0B0,0REDUCE_GRAD\n1F0,1B0\n"));
  EXPECT_EQ(rankText(plan, 0), "0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD");
}

TEST(InsertCommunication, OverlappedActionsSendAndReceiveForAllTheirParts) {
  const Plan plan = *insertCommunication(planOf(readGolden("dualpipev_p2_m8.csv")));
  EXPECT_NE(rankText(plan, 0).find("(0F3;3B1)OVERLAP_F_B 0SEND_F3 3SEND_B1"), std::string::npos) << rankText(plan, 0);
}

TEST(InsertCommunication, KeepsTheOrderOfSendsOnEveryEdgeOfEveryScheduleOfTorch) {
  for (std::string name : goldenPlansWithMessages()) {
    name.replace(name.find("_comms"), 6, "");
    const Result<Plan> plan = insertCommunication(planOf(readGolden(name)));
    ASSERT_TRUE(plan) << name << ": " << plan.status().toString();
    for (ChannelModel model : {ChannelModel::kTagged, ChannelModel::kFifoPerEdge}) {
      EXPECT_TRUE(validate(*plan, model)) << name << ": " << validate(*plan, model).toString();
    }
  }
}

TEST(InsertCommunication, ReceivesEarlierWhereTheConsumersOrderDiffersFromTheSenders) {
  const Plan plan = *insertCommunication(planOf("0F0,0F1\n1F1,1F0\n"));
  EXPECT_EQ(rankText(plan, 1), "1RECV_F0 1RECV_F1 1F1 1F0");
  EXPECT_TRUE(validate(plan, ChannelModel::kOneQueuePerRank));
}

TEST(InsertCommunication, RefusesAPlanThatHasMessagesAlready) {
  const Plan once = *insertCommunication(computePlan("GPipe", 2, 1));
  EXPECT_EQ(insertCommunication(once).status().toString(),
            "rank 0, step 1 (0SEND_F0): the plan already has communication; expected compute actions only");
}

}  // namespace
}  // namespace farandole::pipeline
