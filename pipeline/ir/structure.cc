#include "pipeline/ir/structure.h"

#include <string>

#include "pipeline/ir/action_check.h"
#include "pipeline/ir/message.h"
#include "pipeline/ir/text.h"

namespace farandole::pipeline {
namespace {

constexpr std::int32_t kAbsent = ActionIndex::kAbsent;

// Checks the actions of one stage for one microbatch after another.
class StructureCheck {
 public:
  StructureCheck(const Plan& plan, const ActionIndex& index, Lowering lowering)
      : plan_(plan), index_(index), graph_(index.graph()), lowering_(lowering) {}

  Status run() {
    for (std::int32_t stage = 0; stage < plan_.numStages; ++stage) {
      const MicrobatchRange range = plan_.microbatchesOf(stage);
      for (std::int32_t microbatch = range.begin; microbatch < range.end; ++microbatch) {
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
    if (!index_.hasBackward()) return requireInputs(forward);
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
    FARANDOLE_RETURN_IF_ERROR(requireInputs(forward));
    return requireInputs(backward);
  }

  // What a compute action takes from other stages: from its own rank, or by messages.
  Status requireInputs(const Action& consumer) const {
    for (const std::int32_t edge : inputEdges(graph_, consumer.kind, consumer.stage)) {
      FARANDOLE_RETURN_IF_ERROR(requireInput(consumer, edge));
    }
    return Status::ok();
  }

  Status requireInput(const Action& consumer, std::int32_t number) const {
    const StageEdge& edge = graph_.edge(number);
    if (crossesRanks(plan_, edge)) {
      if (lowering_ == Lowering::kCompute) return Status::ok();
      const Action receive = makeMessage(receiveFor(consumer.kind), edge, consumer.microbatch);
      if (index_.messageStep(receive.kind, number, receive.microbatch) == kAbsent) {
        return missing(receive, toString(consumer) + " consumes what it brings");
      }
      return requireOrder(receive, consumer);
    }
    if (isForward(consumer.kind)) {
      return requireOrder(action(ActionKind::kForward, edge.from, consumer.microbatch), consumer);
    }
    const Action source = inputBackward(edge.to, consumer.microbatch);
    if (index_.step(source) == kAbsent) return missing(source, toString(consumer) + " consumes its result");
    return requireOrder(source, consumer);
  }

  // B, or I where that is not there.
  Action inputBackward(std::int32_t stage, std::int32_t microbatch) const {
    const bool full = index_.has(ActionKind::kBackward, stage, microbatch);
    return action(full ? ActionKind::kBackward : ActionKind::kBackwardInput, stage, microbatch);
  }

  Status checkMessages(std::int32_t stage, std::int32_t microbatch) const {
    for (ActionKind kind : {ActionKind::kSendF, ActionKind::kRecvF, ActionKind::kSendB, ActionKind::kRecvB}) {
      for (const std::int32_t edge : messageEdges(graph_, kind, stage)) {
        const std::int32_t step = index_.messageStep(kind, edge, microbatch);
        if (step != kAbsent) FARANDOLE_RETURN_IF_ERROR(checkMessage(kind, edge, microbatch, step));
      }
    }
    return Status::ok();
  }

  Status checkMessage(ActionKind kind, std::int32_t edge, std::int32_t microbatch, std::int32_t step) const {
    const Action message = makeMessage(kind, graph_.edge(edge), microbatch);
    const std::int32_t rank = plan_.rankOfStage[message.stage];
    if (lowering_ == Lowering::kCompute) {
      return Status::invalidArgument(describeStep(plan_, rank, step) +
                                     ": the plan already has communication; expected compute actions only");
    }
    if (isGradient(kind) && !index_.hasBackward()) {
      return Status::invalidArgument(describeStep(plan_, rank, step) +
                                     ": sends a gradient in a plan that has no backward");
    }
    if (index_.messageStep(otherEnd(kind), edge, microbatch) == kAbsent) {
      return missing(counterpart(message), toString(message) + " of rank " + std::to_string(rank) + ", step " +
                                               std::to_string(step) + " needs its other end");
    }
    if (!isSend(kind)) return Status::ok();
    const Action maker = isGradient(kind) ? inputBackward(message.stage, microbatch)
                                          : action(ActionKind::kForward, message.stage, microbatch);
    return requireOrder(maker, message);
  }

  // Waits for sends and reductions of gradients.
  Status checkRank(std::int32_t rank) const {
    std::vector<std::int32_t> backwardsLeft(plan_.numStages, 0);
    for (std::int32_t stage = 0; index_.hasBackward() && stage < plan_.numStages; ++stage) {
      backwardsLeft[stage] = plan_.microbatchesOf(stage).size();
    }
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
    for (ActionKind kind : {ActionKind::kSendF, ActionKind::kSendB}) {
      if (!waitsFor(wait.kind, kind)) continue;
      for (const std::int32_t edge : messageEdges(graph_, kind, wait.stage)) {
        const std::int32_t sendStep = index_.messageStep(kind, edge, wait.microbatch);
        if (sendStep != kAbsent && sendStep < step) return Status::ok();
      }
    }
    return Status::invalidArgument(describeStep(plan_, rank, step) +
                                   ": no such send was posted before it; expected the send first");
  }

  const Plan& plan_;
  const ActionIndex& index_;
  const StageGraph& graph_;
  Lowering lowering_;
};

}  // namespace

Status checkStructure(const Plan& plan, const ActionIndex& index, Lowering lowering) {
  return StructureCheck(plan, index, lowering).run();
}

}  // namespace farandole::pipeline
