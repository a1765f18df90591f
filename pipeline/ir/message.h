#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/plan.h"
#include "pipeline/ir/stage_graph.h"

namespace farandole::pipeline {

// What passes along the edges of the graph of stages, between different ranks
// only: for each microbatch one message with the output of the stage that the
// edge comes from, and one back with its gradient. A message is named by its
// send or by its receive.

// SEND_F <-> RECV_F, SEND_B <-> RECV_B.
constexpr ActionKind otherEnd(ActionKind kind) {
  switch (kind) {
    case ActionKind::kSendF: return ActionKind::kRecvF;
    case ActionKind::kRecvF: return ActionKind::kSendF;
    case ActionKind::kSendB: return ActionKind::kRecvB;
    default: return ActionKind::kSendB;
  }
}

constexpr bool isGradient(ActionKind message) { return message == ActionKind::kSendB || message == ActionKind::kRecvB; }

// Whether the action is at the end of the edge where this comes from: of SEND_F and RECV_B.
constexpr bool isWhereEdgeBegins(ActionKind kind) { return kind == ActionKind::kSendF || kind == ActionKind::kRecvB; }

// The stage that a message without a name for it is exchanged with, and the stage that any is exchanged with.
constexpr std::int32_t neighbourOf(ActionKind kind, std::int32_t stage) {
  return isWhereEdgeBegins(kind) ? stage + 1 : stage - 1;
}
inline std::int32_t otherStage(const Action& message) {
  return message.other == kNeighbour ? neighbourOf(message.kind, message.stage) : message.other;
}

// The send or receive over an edge.
Action makeMessage(ActionKind kind, const StageEdge& edge, std::int32_t microbatch);

// The edge that a send or receive of existing stages goes over, or kNoEdge.
std::int32_t edgeOf(const StageGraph& graph, const Action& message);

// The other end of the message.
Action counterpart(const Action& message);

// The rank at the other end of a send or receive. The stage at that end must exist.
std::int32_t peerRank(const Plan& plan, const Action& message);

inline bool crossesRanks(const Plan& plan, const StageEdge& edge) {
  return plan.rankOfStage[edge.from] != plan.rankOfStage[edge.to];
}

// The edges that bring what a compute action (one that is not composite) needs, and those that its result goes over.
// A forward needs what all stages before it make, an input backward the gradients of all stages after it.
std::span<const std::int32_t> inputEdges(const StageGraph& graph, ActionKind kind, std::int32_t stage);
std::span<const std::int32_t> outputEdges(const StageGraph& graph, ActionKind kind, std::int32_t stage);

// What brings it over such an edge between ranks, and what hands it on.
constexpr ActionKind receiveFor(ActionKind compute) {
  return isForward(compute) ? ActionKind::kRecvF : ActionKind::kRecvB;
}
constexpr ActionKind sendFor(ActionKind compute) {
  return isForward(compute) ? ActionKind::kSendF : ActionKind::kSendB;
}

// The edges that a stage has messages of this kind over.
inline std::span<const std::int32_t> messageEdges(const StageGraph& graph, ActionKind kind, std::int32_t stage) {
  return isWhereEdgeBegins(kind) ? graph.outOf(stage) : graph.into(stage);
}

// Whether a WAIT_SEND is for sends of this kind.
constexpr bool waitsFor(ActionKind wait, ActionKind send) {
  if (wait == ActionKind::kWaitSend) return isSend(send);
  return wait == (send == ActionKind::kSendF ? ActionKind::kWaitSendF : ActionKind::kWaitSendB);
}

// Messages by number, both ends the same one.
inline std::size_t numMessages(const Plan& plan, const StageGraph& graph) {
  return 2 * static_cast<std::size_t>(graph.numEdges()) * static_cast<std::size_t>(plan.numMicrobatches);
}
inline std::size_t messageNumber(const Plan& plan, const StageGraph& graph, ActionKind kind, std::int32_t edge,
                                 std::int32_t microbatch) {
  const auto row = static_cast<std::size_t>(isGradient(kind) ? graph.numEdges() + edge : edge);
  return row * static_cast<std::size_t>(plan.numMicrobatches) + static_cast<std::size_t>(microbatch);
}

// Whether any action of the plan is a send, a receive or a batch of them.
bool hasCommunication(const Plan& plan);

}  // namespace farandole::pipeline
