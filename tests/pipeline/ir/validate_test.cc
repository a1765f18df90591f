#include "pipeline/ir/validate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <functional>
#include <iostream>

#include "pipeline/passes/fuse_batches.h"
#include "pipeline/passes/insert_communication.h"
#include "pipeline/passes/lower.h"
#include "pipeline/schedules/registry.h"
#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

constexpr ChannelModel kModels[] = {ChannelModel::kTagged, ChannelModel::kFifoPerEdge, ChannelModel::kOneQueuePerRank};

// With messages beside what they are for; lower() has another way for the others, see the tests of queueMessages().
bool runsOnOneQueue(std::string_view schedule) {
  return schedule == "none" || schedule == "GPipe" || schedule == "1F1B";
}

TEST(Validate, AcceptsEveryLoweredScheduleUnderTheChannelModelsThatItRunsOn) {
  for (std::string_view name : scheduleNames()) {
    for (std::int32_t p : {1, 2, 3, 4, 8, 16}) {
      for (std::int32_t m = 1; m <= 3 * p; ++m) {
        for (bool forwardOnly : {false, true}) {
          const Result<Plan> made = makePlan(name, {p, p, m, forwardOnly});
          if (!made) continue;  // one that has two stages for each rank: see the tests of schedules
          const Result<Plan> plan = insertCommunication(*made);
          ASSERT_TRUE(plan) << plan.status().toString();
          for (ChannelModel model : kModels) {
            if (model == ChannelModel::kOneQueuePerRank && !runsOnOneQueue(name)) continue;
            const Status unfused = validate(*plan, model);
            const Status fused = validate(fuseBatches(*plan), model);
            ASSERT_TRUE(unfused) << name << " p " << p << " m " << m << ": " << unfused.toString();
            ASSERT_TRUE(fused) << name << " p " << p << " m " << m << ": " << fused.toString();
          }
        }
      }
    }
  }
}

TEST(Validate, AcceptsThePlansThatTorchLowered) {
  for (const std::string& name : goldenPlansWithMessages()) {
    const Status status = validate(planOf(readGolden(name)), ChannelModel::kTagged);
    EXPECT_TRUE(status) << name << ": " << status.toString();
  }
}

TEST(Validate, ReceivesSwappedAgainstTheirSendsNeedTags) {
  const Plan plan = planOf("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n");
  EXPECT_TRUE(validate(plan, ChannelModel::kTagged));
  for (ChannelModel model : {ChannelModel::kFifoPerEdge, ChannelModel::kOneQueuePerRank}) {
    EXPECT_EQ(validate(plan, model).toString(),
              "message 0 from rank 0 to rank 1: 0SEND_F0 is sent at rank 0, step 1 (0SEND_F0), but 1RECV_F1 is "
              "received at rank 1, step 0 (1RECV_F1); expected receives in the order of their sends, for the channel "
              "matches them in turn");
  }
}

constexpr std::string_view kSendsThatWait =
    "0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND0,1RECV_F1,1F1,1B1,1SEND_B1\n";

TEST(Validate, RefusesNeighboursThatWaitForTheirSendsAtOnceAndPrintsTheCycle) {
  EXPECT_EQ(validate(planOf(kSendsThatWait), ChannelModel::kTagged).toString(),
            "deadlock under kTagged:\n"
            "  rank 0, step 4 (0WAIT_SEND1) waits for step 3 (0SEND_F1)\n"
            "  rank 0, step 3 (0SEND_F1) needs 1RECV_F1 of rank 1, step 5 (1RECV_F1), which that rank has not reached\n"
            "  rank 1, step 4 (1WAIT_SEND0) waits for step 3 (1SEND_B0)\n"
            "  rank 1, step 3 (1SEND_B0) needs 0RECV_B0 of rank 0, step 5 (0RECV_B0), which that rank has not reached\n"
            "and so back to rank 0, step 4 (0WAIT_SEND1). Steps around it, stuck ones in brackets:\n"
            "  rank 0 | 1:0SEND_F0  2:0F1 [3:0SEND_F1][4:0WAIT_SEND1] 5:0RECV_B0  6:0B0  7:0RECV_B1\n"
            "  rank 1 | 1:1F0       2:1B0 [3:1SEND_B0][4:1WAIT_SEND0] 5:1RECV_F1  6:1F1  7:1B1");
}

TEST(Validate, TheSameExchangeAsABatchRuns) {
  const Plan plan = planOf(
      "0F0,0SEND_F0,0F1,(0SEND_F1;0RECV_B0)BATCH_P2P,0WAIT_SEND1,0B0,0RECV_B1,0B1\n"
      "1RECV_F0,1F0,1B0,(1SEND_B0;1RECV_F1)BATCH_P2P,1WAIT_SEND0,1F1,1B1,1SEND_B1\n");
  for (ChannelModel model : kModels) EXPECT_TRUE(validate(plan, model)) << validate(plan, model).toString();
}

TEST(Validate, OneQueueDeadlocksWhereBothSidesSendFirst) {
  const Plan plan = planOf(
      "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
      "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n");
  EXPECT_TRUE(validate(plan, ChannelModel::kTagged));
  EXPECT_TRUE(validate(plan, ChannelModel::kFifoPerEdge));
  const std::string refusal = validate(plan, ChannelModel::kOneQueuePerRank).toString();
  EXPECT_NE(refusal.find("deadlock under kOneQueuePerRank"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("is queued behind step 3 (0SEND_F1)"), std::string::npos) << refusal;
}

TEST(Validate, AcceptsBatchesThatHoldSeveralMicrobatches) {
  const Plan plan = planOf(
      "0F0,0F1,(0SEND_F1;0SEND_F0)BATCH_P2P,0RECV_B0,0B0,0RECV_B1,0B1\n"
      "(1RECV_F1;1RECV_F0)BATCH_P2P,1F0,1F1,1B1,1B0,1SEND_B0,1SEND_B1\n");
  for (ChannelModel model : kModels) EXPECT_TRUE(validate(plan, model)) << validate(plan, model).toString();
}

// A ring of p ranks with two stages each, all of which wait for each send at
// once: with p + 1 microbatches under way none is left to receive.
Plan ringThatWaitsForItsSends(std::int32_t p) {
  Plan plan{2 * p, p + 1, {}, std::vector<std::vector<Action>>(static_cast<std::size_t>(p))};
  for (std::int32_t stage = 0; stage < 2 * p; ++stage) {
    plan.rankOfStage.push_back(stage % p);
    for (std::int32_t microbatch = 0; microbatch <= p; ++microbatch) {
      auto& actions = plan.ranks[stage % p];
      if (stage > 0) actions.push_back({stage, ActionKind::kRecvF, microbatch, {}});
      actions.push_back({stage, ActionKind::kForward, microbatch, {}});
      if (stage == 2 * p - 1) continue;
      actions.push_back({stage, ActionKind::kSendF, microbatch, {}});
      actions.push_back({stage, ActionKind::kWaitSend, microbatch, {}});
    }
  }
  return plan;
}

TEST(Validate, FollowsACycleThroughManyRanksAndKeepsTheReportSmall) {
  Plan plan = ringThatWaitsForItsSends(64);
  const std::string refusal = validate(plan, ChannelModel::kTagged).toString();
  EXPECT_EQ(refusal.find("deadlock under kTagged:"), 0u) << refusal;
  EXPECT_NE(refusal.find("\n  ... and 116 more\n"), std::string::npos) << refusal;  // of 2 waits on each of 64 ranks
  EXPECT_NE(refusal.find("and so back to rank 0, step"), std::string::npos) << refusal;
  EXPECT_LT(refusal.size(), 4000u);
  for (auto& actions : plan.ranks) {
    std::erase_if(actions, [](const Action& action) { return action.kind == ActionKind::kWaitSend; });
  }
  EXPECT_TRUE(validate(plan, ChannelModel::kTagged));
}

// Seconds of this process's processor time: others on the machine do not count.
double seconds(const std::function<void()>& run) {
  const std::clock_t start = std::clock();
  run();
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

constexpr double kLimit = 2.0;

// The least of three, as far as it needs them: the cores of a shared machine are at times half as fast.
double leastSeconds(const std::function<void()>& run) {
  double least = seconds(run);
  for (int again = 0; again < 2 && least >= kLimit; ++again) least = std::min(least, seconds(run));
  return least;
}

#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
constexpr std::int32_t kMicrobatches = 1024;
#else
constexpr std::int32_t kMicrobatches = 64;  // where everything takes many times as long
#endif

TEST(Validate, TakesLessThanTwoSecondsFor256StagesOn64RanksAnd1024Microbatches) {
  for (const std::string_view name : {"Interleaved1F1B", "InterleavedZeroBubble"}) {
    const Result<Plan> plan = makePlan(name, {64, 256, kMicrobatches, false});
    ASSERT_TRUE(plan) << plan.status().toString();
    for (const ChannelModel model : kModels) {
      // lower() proves the result, too; with one queue for each rank it refuses one order and takes queueMessages().
      Result<Plan> lowered = Plan{};
      const double lowering = leastSeconds([&] { lowered = lower(*plan, model); });
      ASSERT_TRUE(lowered) << name << ": " << lowered.status().toString();
      const double validating = leastSeconds([&] { EXPECT_TRUE(validate(*lowered, model)); });
      std::cout << name << ", " << toString(model) << ": lower " << lowering << " s, validate " << validating << " s\n";
      EXPECT_LT(validating, kLimit);
      EXPECT_LT(lowering, kLimit);
    }
  }
}

}  // namespace
}  // namespace farandole::pipeline
