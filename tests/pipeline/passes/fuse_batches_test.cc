#include "pipeline/passes/fuse_batches.h"

#include <gtest/gtest.h>

#include "pipeline/ir/action_kind.h"
#include "pipeline/passes/insert_communication.h"
#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

TEST(FuseBatches, TheExchangesOf1F1BComeOutAsOneBatchPerPeer) {
  const Plan plan = fuseBatches(*insertCommunication(computePlan("1F1B", 3, 4)));
  EXPECT_EQ(rankText(plan, 0),
            "0F0 0SEND_F0 0F1 0SEND_F1 0F2 (0SEND_F2;0RECV_B0)BATCH_P2P 0B0 0F3 (0SEND_F3;0RECV_B1)BATCH_P2P 0B1 "
            "0RECV_B2 0B2 0RECV_B3 0B3");
  EXPECT_EQ(rankText(plan, 1),
            "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 (1SEND_F1;1RECV_B0)BATCH_P2P 1B0 (1RECV_F2;1SEND_B0)BATCH_P2P 1F2 "
            "(1SEND_F2;1RECV_B1)BATCH_P2P 1B1 (1RECV_F3;1SEND_B1)BATCH_P2P 1F3 (1SEND_F3;1RECV_B2)BATCH_P2P 1B2 "
            "1SEND_B2 1RECV_B3 1B3 1SEND_B3");
  EXPECT_EQ(rankText(plan, 2),
            "2RECV_F0 2F0 2B0 (2RECV_F1;2SEND_B0)BATCH_P2P 2F1 2B1 (2RECV_F2;2SEND_B1)BATCH_P2P 2F2 2B2 "
            "(2RECV_F3;2SEND_B2)BATCH_P2P 2F3 2B3 2SEND_B3");
}

TEST(FuseBatches, LeavesAloneWhatThePeerDoesNotPostTogether) {
  // The last forward of GPipe and the first gradient meet on one side only.
  const Plan plan = fuseBatches(*insertCommunication(computePlan("GPipe", 2, 2)));
  EXPECT_EQ(rankText(plan, 0), "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1");
}

TEST(FuseBatches, GroupsByPeerWhatIsPostedTogether) {
  const Plan plan = planOf(
      "0F0,0F1,0SEND_F1,0RECV_B0,0B0,0B1\n"
      "1F0,1F1,1SEND_F0,1SEND_B0,1RECV_B1,1RECV_F1,1RECV_F0,1B0,1B1\n"
      "2F0,2F1,2SEND_B1,2RECV_F0,2B0,2B1\n");
  EXPECT_EQ(rankText(fuseBatches(plan), 1),
            "1F0 1F1 (1SEND_F0;1RECV_B1)BATCH_P2P (1SEND_B0;1RECV_F1)BATCH_P2P 1RECV_F0 1B0 1B1");
}

TEST(FuseBatches, WaitsKeepBatchesApart) {
  const Plan plan = planOf("0F0,0SEND_F0,0WAIT_SEND0,0RECV_B0\n1F0,1RECV_F0,1SEND_B0\n");
  EXPECT_EQ(rankText(fuseBatches(plan), 0), "0F0 0SEND_F0 0WAIT_SEND0 0RECV_B0");
  EXPECT_EQ(rankText(fuseBatches(plan), 1), "1F0 1RECV_F0 1SEND_B0");
}

TEST(FuseBatches, FusingTwiceChangesNothing) {
  const Plan plan = fuseBatches(*insertCommunication(computePlan("1F1B", 4, 9)));
  EXPECT_EQ(fuseBatches(plan), plan);
}

TEST(FuseBatches, AMalformedPlanComesBackAsItIs) {
  const Plan plan = planOf("0F0,0SEND_F0,0RECV_B0,9F0\n1F0\n", {0, 1});
  EXPECT_EQ(fuseBatches(plan), plan);
}

TEST(FuseBatches, LosesNoMessage) {
  const auto count = [](const Plan& plan) {
    std::size_t messages = 0;
    for (const auto& actions : plan.ranks) {
      for (const Action& action : actions) messages += isPost(action.kind) ? leaves(action).size() : 0;
    }
    return messages;
  };
  const Plan plan = *insertCommunication(computePlan("1F1B", 8, 20));
  EXPECT_EQ(count(plan), 2u * 2u * 7u * 20u);
  EXPECT_EQ(count(fuseBatches(plan)), count(plan));
}

}  // namespace
}  // namespace farandole::pipeline
