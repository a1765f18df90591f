#include "pipeline/passes/prepost_receives.h"

#include <gtest/gtest.h>

#include "pipeline/ir/simulate.h"
#include "pipeline/ir/validate.h"
#include "pipeline/passes/insert_communication.h"
#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

TEST(PrepostReceives, PostsReceivesOneComputeActionEarlier) {
  const Plan plan = prepostReceives(*insertCommunication(computePlan("GPipe", 2, 2)), 1);
  EXPECT_EQ(rankText(plan, 0), "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1");
  EXPECT_EQ(rankText(plan, 1), "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1");
}

TEST(PrepostReceives, DepthZeroChangesNothing) {
  const Plan plan = *insertCommunication(computePlan("1F1B", 4, 6));
  EXPECT_EQ(prepostReceives(plan, 0), plan);
}

TEST(PrepostReceives, KeepsPlansValidForTransportsThatStartEveryPost) {
  for (std::string_view name : {"GPipe", "1F1B"}) {
    for (std::int32_t p : {2, 3, 4, 8}) {
      for (std::int32_t m : {1, 2, 7, 16}) {
        const Plan plan = *insertCommunication(computePlan(name, p, m));
        for (std::int32_t depth : {1, 2, 3, 100}) {
          for (ChannelModel model : {ChannelModel::kTagged, ChannelModel::kFifoPerEdge}) {
            const Status status = validate(prepostReceives(plan, depth), model);
            ASSERT_TRUE(status) << name << " p " << p << " m " << m << " depth " << depth << ": " << status.toString();
          }
        }
      }
    }
  }
}

TEST(PrepostReceives, HidesTransfersOf1F1BBehindCompute) {
  const Plan plan = *insertCommunication(computePlan("1F1B", 4, 16));
  const SimulationCosts costs{std::vector<StageCost>(4, {1, 2, 0, 0}), 0.25};
  EXPECT_LT(simulate(prepostReceives(plan, 1), costs)->makespan, simulate(plan, costs)->makespan);
}

}  // namespace
}  // namespace farandole::pipeline
