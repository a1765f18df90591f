#pragma once

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "pipeline/ir/action.h"

namespace farandole::pipeline {

constexpr bool isForward(ActionKind kind) { return kind == ActionKind::kForward; }

// Makes the gradient that the stages before wait for.
constexpr bool isInputBackward(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardInput;
}

// Ends the backward of a microbatch: its activations are free, its weight gradients complete.
constexpr bool isWeightBackward(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardWeight;
}

constexpr bool isSend(ActionKind kind) { return kind == ActionKind::kSendF || kind == ActionKind::kSendB; }
constexpr bool isReceive(ActionKind kind) { return kind == ActionKind::kRecvF || kind == ActionKind::kRecvB; }

constexpr bool isMessage(ActionKind kind) { return isSend(kind) || isReceive(kind); }

constexpr bool isWaitSend(ActionKind kind) {
  return kind == ActionKind::kWaitSend || kind == ActionKind::kWaitSendF || kind == ActionKind::kWaitSendB;
}

// Made of parts, with neither stage nor microbatch of its own.
constexpr bool isComposite(ActionKind kind) { return kind == ActionKind::kOverlapFB || kind == ActionKind::kBatchP2p; }

// Posts messages and returns at once.
constexpr bool isPost(ActionKind kind) { return isMessage(kind) || kind == ActionKind::kBatchP2p; }

constexpr bool isCompute(ActionKind kind) {
  return isForward(kind) || isInputBackward(kind) || isWeightBackward(kind) || kind == ActionKind::kOverlapFB;
}

// Concerns one microbatch rather than the whole stage.
constexpr bool hasMicrobatch(ActionKind kind) {
  switch (kind) {
    case ActionKind::kUnshard:
    case ActionKind::kReshard:
    case ActionKind::kReduceGrad:
    case ActionKind::kWaitReduceGrad:
    case ActionKind::kOverlapFB:
    case ActionKind::kBatchP2p: return false;
    default: return true;
  }
}

// The parts of a composite action, or the action alone.
inline std::span<const Action> leaves(const Action& action) {
  return isComposite(action.kind) ? std::span<const Action>(action.parts) : std::span<const Action>(&action, 1);
}

inline bool hasInputBackward(const Action& action) {
  return std::ranges::any_of(leaves(action), isInputBackward, &Action::kind);
}

inline Action makeComposite(ActionKind kind, std::vector<Action> parts) {
  return Action{kNoStage, kind, kNoMicrobatch, std::move(parts)};
}

}  // namespace farandole::pipeline
