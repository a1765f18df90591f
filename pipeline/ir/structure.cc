#include "pipeline/ir/structure.h"

#include <optional>
#include <string>

#include "pipeline/ir/action_check.h"
#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/chain.h"
#include "pipeline/ir/text.h"

namespace farandole::pipeline {
namespace {

constexpr std::int32_t kAbsent = ActionIndex::kAbsent;

// Checks the actions of one stage for one microbatch after another.
class StructureCheck {
 public:
  StructureCheck(const Plan& plan, const ActionIndex& index, Lowering lowering)
      : plan_(plan), index_(index), lowering_(lowering) {}

  Status run() {
    for (std::int32_t stage = 0; stage < plan_.numStages; ++stage) {
      for (std::int32_t microbatch = 0; microbatch < plan_.numMicrobatches; ++microbatch) {
        FARANDOLE_RETURN_IF_ERROR(checkCompute(stage, microbatch));
        FARANDOLE_RETURN_IF_ERROR(checkMessages(stage, microbatch));
      }
    }
    for (std::int32_t rank = 0; rank < plan_.numRanks(); ++rank) FARANDOLE_RETURN_IF_ERROR(checkRank(rank));
    return Status::ok();
  }

 private:
  Status missing(const Action& action, const std::string& why) const {
    return Status::invalidArgument(toString(action) + " is missing on rank " +
                                   std::to_string(plan_.rankOfStage[action.stage]) + "; expected it because " + why);
  }

  // Both on one rank and there.
  Status requireOrder(const Action& first, const Action& second) const {
    if (index_.step(first) < index_.step(second)) return Status::ok();
    const std::int32_t rank = plan_.rankOfStage[second.stage];
    return Status::invalidArgument(describeStep(plan_, rank, index_.step(second)) + ": needs " + toString(first) +
                                   ", which comes only in step " + std::to_string(index_.step(first)) +
                                   "; expected it before");
  }

  Action action(ActionKind kind, std::int32_t stage, std::int32_t microbatch) const {
    return Action{stage, kind, microbatch, {}};
  }

  Status checkCompute(std::int32_t stage, std::int32_t microbatch) const {
    const Action forward = action(ActionKind::kForward, stage, microbatch);
    const Action full = action(ActionKind::kBackward, stage, microbatch);
    const Action input = action(ActionKind::kBackwardInput, stage, microbatch);
    const Action weight = action(ActionKind::kBackwardWeight, stage, microbatch);
    const bool hasFull = index_.step(full) != kAbsent;
    const bool hasInput = index_.step(input) != kAbsent;
    const bool hasWeight = index_.step(weight) != kAbsent;
    if (index_.step(forward) == kAbsent) return missing(forward, "every stage runs every microbatch");
    if (!index_.hasBackward()) return requireNeighbour(forward);
    if (hasFull && (hasInput || hasWeight)) {
      const Action& split = hasInput ? input : weight;
      return Status::invalidArgument(describeStep(plan_, plan_.rankOfStage[stage], index_.step(split)) + ": " +
                                     toString(full) + " in step " + std::to_string(index_.step(full)) +
                                     " already does this; expected either B or both I and W");
    }
    if (hasInput && !hasWeight) return missing(weight, toString(input) + " leaves the weight gradients to it");
    if (hasWeight && !hasInput) return missing(input, toString(weight) + " completes it");
    if (!hasFull && !hasInput) return missing(full, "other backwards are in the plan");
    const Action& backward = hasFull ? full : input;
    FARANDOLE_RETURN_IF_ERROR(requireOrder(forward, backward));
    if (hasWeight) FARANDOLE_RETURN_IF_ERROR(requireOrder(input, weight));
    FARANDOLE_RETURN_IF_ERROR(requireNeighbour(forward));
    return requireNeighbour(backward);
  }

  // What a compute action takes from its neighbour stage: from its own rank, or by a message.
  Status requireNeighbour(const Action& consumer) const {
    std::optional<Action> source = producer(plan_, consumer);
    if (!source) return Status::ok();
    const std::optional<Action> receive = receiveBefore(plan_, consumer);
    if (receive) {
      if (lowering_ == Lowering::kCompute) return Status::ok();
      if (index_.step(*receive) == kAbsent) return missing(*receive, toString(consumer) + " consumes what it brings");
      return requireOrder(*receive, consumer);
    }
    if (isInputBackward(source->kind)) {
      const bool full = index_.has(ActionKind::kBackward, source->stage, source->microbatch);
      source->kind = full ? ActionKind::kBackward : ActionKind::kBackwardInput;
      if (index_.step(*source) == kAbsent) return missing(*source, toString(consumer) + " consumes its result");
    }
    return requireOrder(*source, consumer);
  }

  Status checkMessages(std::int32_t stage, std::int32_t microbatch) const {
    for (ActionKind kind : {ActionKind::kSendF, ActionKind::kRecvF, ActionKind::kSendB, ActionKind::kRecvB}) {
      const Action message = action(kind, stage, microbatch);
      const std::int32_t step = index_.step(message);
      const bool isGradient = kind == ActionKind::kSendB || kind == ActionKind::kRecvB;
      if (step == kAbsent) continue;
      const std::string where = describeStep(plan_, plan_.rankOfStage[stage], step);
      if (lowering_ == Lowering::kCompute) {
        return Status::invalidArgument(where + ": the plan already has communication; expected compute actions only");
      }
      if (isGradient && !index_.hasBackward()) {
        return Status::invalidArgument(where + ": sends a gradient in a plan that has no backward");
      }
      const Action other = counterpart(message);
      if (index_.step(other) == kAbsent) {
        return missing(other, toString(message) + " of rank " + std::to_string(plan_.rankOfStage[stage]) + ", step " +
                                  std::to_string(step) + " needs its other end");
      }
      if (kind == ActionKind::kSendF) {
        FARANDOLE_RETURN_IF_ERROR(requireOrder(action(ActionKind::kForward, stage, microbatch), message));
      } else if (kind == ActionKind::kSendB) {
        const bool full = index_.has(ActionKind::kBackward, stage, microbatch);
        const Action maker = action(full ? ActionKind::kBackward : ActionKind::kBackwardInput, stage, microbatch);
        FARANDOLE_RETURN_IF_ERROR(requireOrder(maker, message));
      }
    }
    return Status::ok();
  }

  // Waits for sends and reductions of gradients.
  Status checkRank(std::int32_t rank) const {
    std::vector<std::int32_t> backwardsLeft(plan_.numStages, index_.hasBackward() ? plan_.numMicrobatches : 0);
    std::vector<char> reduced(plan_.numStages, 0);
    for (std::int32_t step = 0; const Action& stepAction : plan_.ranks[rank]) {
      for (const Action& leaf : leaves(stepAction)) {
        if (isWeightBackward(leaf.kind)) --backwardsLeft[leaf.stage];
        if (isWaitSend(leaf.kind)) FARANDOLE_RETURN_IF_ERROR(checkWaitSend(leaf, rank, step));
        if (leaf.kind == ActionKind::kReduceGrad) {
          if (backwardsLeft[leaf.stage] > 0) {
            return Status::invalidArgument(describeStep(plan_, rank, step) + ": " +
                                           std::to_string(backwardsLeft[leaf.stage]) +
                                           " microbatches still add to the gradients after it; expected it after "
                                           "the stage's last B or W");
          }
          if (reduced[leaf.stage]++ != 0) {
            return Status::invalidArgument(describeStep(plan_, rank, step) +
                                           ": a second reduction of the stage; "
                                           "expected one");
          }
        }
        if (leaf.kind == ActionKind::kWaitReduceGrad && reduced[leaf.stage] == 0) {
          return Status::invalidArgument(describeStep(plan_, rank, step) + ": no REDUCE_GRAD of the stage before it");
        }
      }
      ++step;
    }
    return Status::ok();
  }

  Status checkWaitSend(const Action& wait, std::int32_t rank, std::int32_t step) const {
    const auto postedBefore = [&](ActionKind kind) {
      const std::int32_t sendStep = index_.step(kind, wait.stage, wait.microbatch);
      return sendStep != kAbsent && sendStep < step;
    };
    const bool forward = wait.kind != ActionKind::kWaitSendB && postedBefore(ActionKind::kSendF);
    const bool gradient = wait.kind != ActionKind::kWaitSendF && postedBefore(ActionKind::kSendB);
    if (forward || gradient) return Status::ok();
    return Status::invalidArgument(describeStep(plan_, rank, step) +
                                   ": no such send was posted before it; expected the send first");
  }

  const Plan& plan_;
  const ActionIndex& index_;
  Lowering lowering_;
};

}  // namespace

Status checkStructure(const Plan& plan, const ActionIndex& index, Lowering lowering) {
  return StructureCheck(plan, index, lowering).run();
}

}  // namespace farandole::pipeline
