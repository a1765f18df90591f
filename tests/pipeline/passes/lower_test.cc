#include "pipeline/passes/lower.h"

#include <gtest/gtest.h>

#include "pipeline/ir/validate.h"
#include "pipeline/passes/fuse_batches.h"
#include "pipeline/passes/insert_communication.h"
#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

TEST(Lower, InsertsFusesAndProves) {
  const Plan compute = computePlan("1F1B", 4, 6);
  const Result<Plan> lowered = lower(compute);
  ASSERT_TRUE(lowered) << lowered.status().toString();
  EXPECT_EQ(*lowered, fuseBatches(*insertCommunication(compute)));
}

TEST(Lower, TakesEveryScheduleOfTorchToATaggedTransport) {
  for (std::string name : goldenPlansWithMessages()) {
    name.replace(name.find("_comms"), 6, "");
    const Result<Plan> lowered = lower(planOf(readGolden(name)), ChannelModel::kTagged);
    EXPECT_TRUE(lowered) << name << ": " << lowered.status().toString();
  }
}

TEST(Lower, RefusesRanksThatWaitForEachOther) {
  const Result<Plan> lowered = lower(planOf("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"));
  ASSERT_FALSE(lowered);
  const std::string refusal = lowered.status().toString();
  EXPECT_EQ(refusal.find("the lowered plan cannot run: deadlock under kOneQueuePerRank:\n  rank"), 0u) << refusal;
}

}  // namespace
}  // namespace farandole::pipeline
