#include "pipeline/ir/chain.h"

#include <algorithm>

#include "pipeline/ir/action_kind.h"

namespace farandole::pipeline {
namespace {

std::optional<Action> ifCrossing(const Plan& plan, const Action& message) {
  if (!crossesRanks(plan, message)) return std::nullopt;
  return message;
}

}  // namespace

Action counterpart(const Action& message) {
  switch (message.kind) {
    case ActionKind::kSendF: return {message.stage + 1, ActionKind::kRecvF, message.microbatch, {}};
    case ActionKind::kRecvF: return {message.stage - 1, ActionKind::kSendF, message.microbatch, {}};
    case ActionKind::kSendB: return {message.stage - 1, ActionKind::kRecvB, message.microbatch, {}};
    default: return {message.stage + 1, ActionKind::kSendB, message.microbatch, {}};
  }
}

std::int32_t peerRank(const Plan& plan, const Action& message) { return plan.rankOfStage[counterpart(message).stage]; }

bool crossesRanks(const Plan& plan, const Action& message) {
  const std::int32_t other = counterpart(message).stage;
  if (other < 0 || other >= plan.numStages) return false;
  return plan.rankOfStage[other] != plan.rankOfStage[message.stage];
}

std::optional<Action> producer(const Plan& plan, const Action& action) {
  if (isForward(action.kind) && action.stage > 0) {
    return Action{action.stage - 1, action.kind, action.microbatch, {}};
  }
  if (isInputBackward(action.kind) && action.stage + 1 < plan.numStages) {
    return Action{action.stage + 1, action.kind, action.microbatch, {}};
  }
  return std::nullopt;
}

std::optional<Action> sendAfter(const Plan& plan, const Action& action) {
  if (isForward(action.kind)) return ifCrossing(plan, {action.stage, ActionKind::kSendF, action.microbatch, {}});
  if (isInputBackward(action.kind)) return ifCrossing(plan, {action.stage, ActionKind::kSendB, action.microbatch, {}});
  return std::nullopt;
}

std::optional<Action> receiveBefore(const Plan& plan, const Action& action) {
  if (isForward(action.kind)) return ifCrossing(plan, {action.stage, ActionKind::kRecvF, action.microbatch, {}});
  if (isInputBackward(action.kind)) return ifCrossing(plan, {action.stage, ActionKind::kRecvB, action.microbatch, {}});
  return std::nullopt;
}

bool hasCommunication(const Plan& plan) {
  return std::any_of(plan.ranks.begin(), plan.ranks.end(), [](const std::vector<Action>& actions) {
    return std::any_of(actions.begin(), actions.end(), [](const Action& action) { return isPost(action.kind); });
  });
}

}  // namespace farandole::pipeline
