#include "pipeline/ir/timed_messages.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/text.h"
#include "tests/pipeline/ir/plan_fixtures.h"

namespace farandole::pipeline {
namespace {

SimulationResult simulated(const Plan& plan, double transfer) {
  return *simulate(
      plan, SimulationCosts{std::vector<StageCost>(static_cast<std::size_t>(plan.numStages), {1, 2, 1, 1}), transfer});
}

TEST(TimedMessages, EveryReceiveOfThePlanIsOneAndComputationFollowsItsArrival) {
  for (const std::string& name : goldenPlansWithMessages()) {
    SCOPED_TRACE(name);
    const Plan plan = planOf(readGolden(name));
    const SimulationResult step = simulated(plan, 0.25);
    std::map<std::string, TimedMessage> messages;
    for (const TimedMessage& message : timedMessages(step)) {
      EXPECT_TRUE(messages.emplace(toString(message.receive), message).second);
      EXPECT_EQ(plan.rankOfStage[message.receive.stage], message.receiver);
      EXPECT_GE(message.arrived, message.sent + 0.25);
    }
    std::size_t receives = 0;
    for (std::int32_t rank = 0; rank < plan.numRanks(); ++rank) {
      for (const TimedAction& timed : step.ranks[rank].actions) {
        for (const Action& leaf : leaves(timed.action)) {
          receives += isReceive(leaf.kind) ? 1 : 0;
          if (!isForward(leaf.kind) && !isInputBackward(leaf.kind)) continue;
          const std::string direction = isForward(leaf.kind) ? "RECV_F" : "RECV_B";
          const auto needed = messages.find(std::to_string(leaf.stage) + direction + std::to_string(leaf.microbatch));
          if (needed != messages.end()) {
            EXPECT_LE(needed->second.arrived, timed.start);
          }
        }
      }
    }
    EXPECT_EQ(receives, messages.size());
  }
}

TEST(TimedMessages, AStepWithoutCommunicationOrOneThatWasMeasuredHasNone) {
  EXPECT_TRUE(timedMessages(simulated(computePlan("1F1B", 2, 3), 1)).empty());
  SimulationResult measured = simulated(loweredPlan("1F1B", 2, 3), 1);
  EXPECT_FALSE(timedMessages(measured).empty());
  measured.transfer.reset();
  EXPECT_TRUE(timedMessages(measured).empty());
}

}  // namespace
}  // namespace farandole::pipeline
