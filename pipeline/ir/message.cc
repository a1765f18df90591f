#include "pipeline/ir/message.h"

#include <algorithm>

namespace farandole::pipeline {

Action makeMessage(ActionKind kind, const StageEdge& edge, std::int32_t microbatch) {
  const bool begins = isWhereEdgeBegins(kind);
  const std::int32_t other = begins ? edge.to : edge.from;
  Action message{begins ? edge.from : edge.to, kind, microbatch, {}};
  if (other != neighbourOf(kind, message.stage)) message.other = other;
  return message;
}

std::int32_t edgeOf(const StageGraph& graph, const Action& message) {
  const std::int32_t other = otherStage(message);
  return isWhereEdgeBegins(message.kind) ? graph.find(message.stage, other) : graph.find(other, message.stage);
}

Action counterpart(const Action& message) {
  const std::int32_t other = otherStage(message);
  const bool begins = isWhereEdgeBegins(message.kind);
  const StageEdge edge{begins ? message.stage : other, begins ? other : message.stage};
  return makeMessage(otherEnd(message.kind), edge, message.microbatch);
}

std::int32_t peerRank(const Plan& plan, const Action& message) { return plan.rankOfStage[otherStage(message)]; }

std::span<const std::int32_t> inputEdges(const StageGraph& graph, ActionKind kind, std::int32_t stage) {
  if (isForward(kind)) return graph.into(stage);
  if (isInputBackward(kind)) return graph.outOf(stage);
  return {};
}

std::span<const std::int32_t> outputEdges(const StageGraph& graph, ActionKind kind, std::int32_t stage) {
  if (isForward(kind)) return graph.outOf(stage);
  if (isInputBackward(kind)) return graph.into(stage);
  return {};
}

bool hasCommunication(const Plan& plan) {
  return std::any_of(plan.ranks.begin(), plan.ranks.end(), [](const std::vector<Action>& actions) {
    return std::any_of(actions.begin(), actions.end(), [](const Action& action) { return isPost(action.kind); });
  });
}

}  // namespace farandole::pipeline
