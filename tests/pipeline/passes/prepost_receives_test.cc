#include "pipeline/passes/prepost_receives.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/simulate.h"
#include "pipeline/ir/validate.h"
#include "pipeline/passes/insert_communication.h"
#include "pipeline/schedules/registry.h"
#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

TEST(PrepostReceives, PostsReceivesOneComputeActionEarlier) {
  const Plan plan = prepostReceives(*insertCommunication(computePlan("GPipe", 2, 2)), 1);
  EXPECT_EQ(rankText(plan, 0), "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1");
  EXPECT_EQ(rankText(plan, 1), "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1");
}

TEST(PrepostReceives, LetsTheFirstForwardRunAndTheActivationLeaveBefore) {
  // However deep: 0F0 waits for no message, and no gradient can come before its activation has gone.
  const Plan plan = prepostReceives(*insertCommunication(computePlan("1F1B", 3, 2)), 100);
  EXPECT_EQ(rankText(plan, 0), "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1");
  EXPECT_EQ(rankText(plan, 1),
            "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_B0 1F1 1SEND_F1 1RECV_B1 1B0 1SEND_B0 1B1 1SEND_B1");
  const Plan interleaved = *insertCommunication(*makePlan("Interleaved1F1B", {2, 4, 2, true}));
  EXPECT_EQ(rankText(prepostReceives(interleaved, 100), 0),
            "0F0 0SEND_F0 2RECV_F0 2RECV_F1 0F1 0SEND_F1 2F0 2SEND_F0 2F1 2SEND_F1");
}

// The most receives of a rank whose messages nothing has consumed yet.
std::int32_t openAtMost(const Plan& plan, std::int32_t rank) {
  std::int32_t open = 0;
  std::int32_t most = 0;
  for (const Action& action : plan.ranks[rank]) {
    open += isReceive(action.kind) ? 1 : 0;
    most = std::max(most, open);
    // In a chain of one stage on each rank every compute action but the ends' consumes one.
    if (action.kind == ActionKind::kForward && action.stage > 0) --open;
    if (action.kind == ActionKind::kBackward && action.stage + 1 < plan.numStages) --open;
  }
  return most;
}

TEST(PrepostReceives, HoldsNoMoreThanTheMessagesOfSoManyActions) {
  for (std::string_view name : {"GPipe", "1F1B"}) {
    const Plan plan = *insertCommunication(computePlan(name, 4, 16));
    for (std::int32_t depth : {0, 1, 2, 5}) {
      const Plan moved = prepostReceives(plan, depth);
      for (std::int32_t rank = 0; rank < 4; ++rank) {
        EXPECT_LE(openAtMost(moved, rank), 1 + depth) << name << " rank " << rank << " depth " << depth;
      }
      EXPECT_EQ(openAtMost(moved, 1), 1 + depth) << "and in the middle so many";
    }
  }
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
