#include "pipeline/runtime/program.h"

#include <algorithm>
#include <span>

#include "pipeline/ir/text.h"
#include "pipeline/runtime/message_tag.h"

namespace farandole::pipeline {

namespace {

// FNV-1a over what makes two plans the same.
class Digest {
 public:
  void add(std::int64_t value) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash_ = (hash_ ^ ((static_cast<std::uint64_t>(value) >> shift) & 0xff)) * 0x100000001b3ull;
    }
  }
  void add(const Action& action) {
    add(action.stage);
    add(static_cast<std::int64_t>(action.kind));
    add(action.microbatch);
    add(static_cast<std::int64_t>(action.parts.size()));
    for (const Action& part : action.parts) add(part);
  }
  std::uint64_t value() const { return hash_; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325ull;
};

std::uint64_t digestOf(const Plan& plan) {
  Digest digest;
  digest.add(plan.numStages);
  digest.add(plan.numMicrobatches);
  for (std::int32_t rank : plan.rankOfStage) digest.add(rank);
  for (const std::vector<Action>& actions : plan.ranks) {
    digest.add(static_cast<std::int64_t>(actions.size()));
    for (const Action& action : actions) digest.add(action);
  }
  return digest.value();
}

class Compiler {
 public:
  Compiler(const Plan& plan, int rank) : plan_(plan) {
    program_.rank = rank;
    program_.numStages = plan.numStages;
    program_.numMicrobatches = plan.numMicrobatches;
    program_.rankOfStage = plan.rankOfStage;
    program_.digest = digestOf(plan);
    for (std::int32_t stage = 0; stage < plan.numStages; ++stage) {
      if (plan.rankOfStage[stage] == rank) program_.stages.push_back(stage);
    }
    program_.splitsBackward.resize(program_.stages.size(), false);
  }

  Result<Program> run() {
    for (const Action& action : plan_.ranks[program_.rank]) FARANDOLE_RETURN_IF_ERROR(add(action));
    markLastBackwards();
    return std::move(program_);
  }

 private:
  Status add(const Action& action) {
    switch (action.kind) {
      case ActionKind::kForward: return addStep(action, StepOp::kForward);
      case ActionKind::kBackward: return addStep(action, StepOp::kBackward);
      case ActionKind::kBackwardInput: return addStep(action, StepOp::kBackwardInput);
      case ActionKind::kBackwardWeight: return addStep(action, StepOp::kBackwardWeight);
      case ActionKind::kWaitSend:
      case ActionKind::kWaitSendF:
      case ActionKind::kWaitSendB:
        FARANDOLE_RETURN_IF_ERROR(addStep(action, StepOp::kWaitSend));
        program_.steps.back().activation = action.kind != ActionKind::kWaitSendB;
        program_.steps.back().gradient = action.kind != ActionKind::kWaitSendF;
        return Status::ok();
      case ActionKind::kSendF:
      case ActionKind::kRecvF:
      case ActionKind::kSendB:
      case ActionKind::kRecvB: return addPost(action, {&action, 1});
      case ActionKind::kBatchP2p: return addPost(action, {action.parts.data(), action.parts.size()});
      case ActionKind::kOverlapFB:
        for (const Action& part : action.parts) FARANDOLE_RETURN_IF_ERROR(add(part));
        return Status::ok();
      // Of modules whose parameters are sharded, which a stage refuses, and of reductions, which begin with the stage's
      // last backward: there is nothing to do.
      case ActionKind::kUnshard:
      case ActionKind::kReshard:
      case ActionKind::kReduceGrad:
      case ActionKind::kWaitReduceGrad: return Status::ok();
    }
    return Status::internal("action " + toString(action) + " is of no known kind");
  }

  Result<std::int32_t> localStage(const Action& action) const {
    const auto found = std::find(program_.stages.begin(), program_.stages.end(), action.stage);
    if (found == program_.stages.end()) {
      return Status::invalidArgument("action " + toString(action) + ": its stage does not live on rank " +
                                     std::to_string(program_.rank));
    }
    if (action.microbatch < 0 || action.microbatch >= plan_.numMicrobatches) {
      return Status::invalidArgument("action " + toString(action) + ": expected a microbatch below " +
                                     std::to_string(plan_.numMicrobatches));
    }
    return static_cast<std::int32_t>(found - program_.stages.begin());
  }

  Status addStep(const Action& action, StepOp op) {
    Result<std::int32_t> stage = localStage(action);
    if (!stage) return stage.status();
    Step step;
    step.op = op;
    step.stage = *stage;
    step.microbatch = action.microbatch;
    if (op == StepOp::kBackward || op == StepOp::kBackwardInput) program_.hasBackward = true;
    if (op == StepOp::kBackwardInput) program_.splitsBackward[*stage] = true;
    program_.steps.push_back(step);
    program_.labels.push_back(toString(action));
    return Status::ok();
  }

  Status addPost(const Action& action, std::span<const Action> parts) {
    Step step;
    step.op = StepOp::kPost;
    step.firstTransfer = static_cast<std::uint32_t>(program_.transfers.size());
    step.numTransfers = static_cast<std::uint32_t>(parts.size());
    step.peer = -1;
    for (const Action& part : parts) {
      Result<std::int32_t> stage = localStage(part);
      if (!stage) return stage.status();
      const bool towardsNext = part.kind == ActionKind::kSendF || part.kind == ActionKind::kRecvB;
      const std::int32_t neighbour = part.stage + (towardsNext ? 1 : -1);
      if (neighbour < 0 || neighbour >= plan_.numStages || plan_.rankOfStage[neighbour] == program_.rank) {
        return Status::invalidArgument("action " + toString(part) + " of rank " + std::to_string(program_.rank) +
                                       ": there is no stage on another rank to talk to");
      }
      if (step.peer >= 0 && step.peer != plan_.rankOfStage[neighbour]) {
        return Status::invalidArgument("action " + toString(action) + ": expected a single peer in a batch");
      }
      step.peer = plan_.rankOfStage[neighbour];
      program_.transfers.push_back({part.kind, *stage, part.microbatch});
    }
    program_.steps.push_back(step);
    program_.labels.push_back(toString(action));
    return Status::ok();
  }

  void markLastBackwards() {
    std::vector<bool> ended(program_.stages.size(), false), inputsEnded(program_.stages.size(), false);
    for (std::size_t i = program_.steps.size(); i-- > 0;) {
      Step& step = program_.steps[i];
      const bool isWhole = step.op == StepOp::kBackward;
      if ((isWhole || step.op == StepOp::kBackwardWeight) && !ended[step.stage]) {
        ended[step.stage] = step.lastBackward = true;
      }
      if ((isWhole || step.op == StepOp::kBackwardInput) && !inputsEnded[step.stage]) {
        inputsEnded[step.stage] = step.lastInputBackward = true;
      }
    }
  }

  const Plan& plan_;
  Program program_;
};

}  // namespace

Result<Program> compileProgram(const Plan& plan, int rank) {
  if (rank < 0 || rank >= plan.numRanks()) {
    return Status::invalidArgument("rank is " + std::to_string(rank) + ", expected 0 to " +
                                   std::to_string(plan.numRanks() - 1) + " as the plan has that many ranks");
  }
  if (plan.numStages < 1 || plan.numStages > kMaxStages || plan.numMicrobatches < 1 ||
      plan.numMicrobatches > kMaxMicrobatches || plan.rankOfStage.size() != static_cast<std::size_t>(plan.numStages)) {
    return Status::invalidArgument("the plan has " + std::to_string(plan.numStages) + " stages, " +
                                   std::to_string(plan.rankOfStage.size()) + " of them placed, and " +
                                   std::to_string(plan.numMicrobatches) + " microbatches; expected 1 to " +
                                   std::to_string(kMaxStages) + " stages, all placed, and 1 to " +
                                   std::to_string(kMaxMicrobatches) + " microbatches");
  }
  if (plan.edges || !plan.microbatchesOfStage.empty()) {
    return Status::invalidArgument(
        "the plan is not for a chain of stages that run all microbatches, as the executor needs it");
  }
  return Compiler(plan, rank).run();
}

}  // namespace farandole::pipeline
