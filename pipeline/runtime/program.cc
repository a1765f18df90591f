#include "pipeline/runtime/program.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "backend/common/digest.h"
#include "pipeline/ir/message.h"
#include "pipeline/ir/stage_graph.h"
#include "pipeline/ir/text.h"
#include "pipeline/runtime/message_tag.h"

namespace farandole::pipeline {

namespace {

void addTo(Digest& digest, const Action& action) {
  digest.add(action.stage);
  digest.add(static_cast<std::int64_t>(action.kind));
  digest.add(action.microbatch);
  digest.add(action.other);
  digest.add(static_cast<std::int64_t>(action.parts.size()));
  for (const Action& part : action.parts) addTo(digest, part);
}

// Of what makes two plans the same.
std::uint64_t digestOf(const Plan& plan) {
  Digest digest;
  digest.add(plan.numStages);
  digest.add(plan.numMicrobatches);
  for (std::int32_t rank : plan.rankOfStage) digest.add(rank);
  digest.add(plan.edges ? static_cast<std::int64_t>(plan.edges->size()) : -1);
  for (const StageEdge& edge : plan.edges.value_or(std::vector<StageEdge>())) {
    digest.add(edge.from);
    digest.add(edge.to);
  }
  for (const MicrobatchRange& range : plan.microbatchesOfStage) {
    digest.add(range.begin);
    digest.add(range.end);
  }
  for (const std::vector<Action>& actions : plan.ranks) {
    digest.add(static_cast<std::int64_t>(actions.size()));
    for (const Action& action : actions) addTo(digest, action);
  }
  return digest.value();
}

class Compiler {
 public:
  Compiler(const Plan& plan, const StageGraph& graph, int rank) : plan_(plan), graph_(graph) {
    program_.rank = rank;
    program_.numMicrobatches = plan.numMicrobatches;
    program_.digest = digestOf(plan);
    for (std::int32_t stage = 0; stage < plan.numStages; ++stage) {
      if (plan.rankOfStage[stage] != rank) continue;
      program_.stages.push_back({stage, false, linksOf(stage, true), linksOf(stage, false)});
    }
    for (ProgramStage& stage : program_.stages) {
      for (StageLink& link : stage.into) locate(link, &ProgramStage::outOf);
      for (StageLink& link : stage.outOf) locate(link, &ProgramStage::into);
    }
  }

  Result<Program> run() {
    for (const Action& action : plan_.ranks[program_.rank]) FARANDOLE_RETURN_IF_ERROR(add(action));
    markLastBackwards();
    markArrived();
    return std::move(program_);
  }

 private:
  Status add(const Action& action) {
    switch (action.kind) {
      case ActionKind::kForward: return addInstruction(action, InstructionOp::kForward);
      case ActionKind::kBackward: return addInstruction(action, InstructionOp::kBackward);
      case ActionKind::kBackwardInput: return addInstruction(action, InstructionOp::kBackwardInput);
      case ActionKind::kBackwardWeight: return addInstruction(action, InstructionOp::kBackwardWeight);
      case ActionKind::kWaitSend:
      case ActionKind::kWaitSendF:
      case ActionKind::kWaitSendB:
        FARANDOLE_RETURN_IF_ERROR(addInstruction(action, InstructionOp::kWaitSend));
        program_.instructions.back().activation = action.kind != ActionKind::kWaitSendB;
        program_.instructions.back().gradient = action.kind != ActionKind::kWaitSendF;
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

  std::vector<StageLink> linksOf(std::int32_t stage, bool into) const {
    std::vector<StageLink> links;
    for (const std::int32_t number : into ? graph_.into(stage) : graph_.outOf(stage)) {
      const StageEdge& edge = graph_.edge(number);
      const std::int32_t other = into ? edge.from : edge.to;
      links.push_back({number, other, plan_.rankOfStage[other]});
    }
    std::ranges::sort(links, {}, &StageLink::other);
    return links;
  }

  // Where the other end is on this rank.
  void locate(StageLink& link, std::vector<StageLink> ProgramStage::*otherSide) const {
    const std::int32_t local = findStage(link.other);
    if (local == StageLink::kElsewhere) return;
    link.local = local;
    link.place = findLink(program_.stages[local].*otherSide, link.edge);
  }

  std::int32_t findStage(std::int32_t index) const {
    const auto found = std::ranges::find(program_.stages, index, &ProgramStage::index);
    if (found == program_.stages.end()) return StageLink::kElsewhere;
    return static_cast<std::int32_t>(found - program_.stages.begin());
  }

  static std::int32_t findLink(const std::vector<StageLink>& links, std::int32_t edge) {
    return static_cast<std::int32_t>(std::ranges::find(links, edge, &StageLink::edge) - links.begin());
  }

  Result<std::int32_t> localStage(const Action& action) const {
    const std::int32_t stage = findStage(action.stage);
    if (stage == StageLink::kElsewhere) {
      return Status::invalidArgument("action " + toString(action) + ": its stage does not live on rank " +
                                     std::to_string(program_.rank));
    }
    if (action.microbatch < 0 || action.microbatch >= plan_.numMicrobatches) {
      return Status::invalidArgument("action " + toString(action) + ": expected a microbatch below " +
                                     std::to_string(plan_.numMicrobatches));
    }
    return stage;
  }

  Status addInstruction(const Action& action, InstructionOp op) {
    Result<std::int32_t> stage = localStage(action);
    if (!stage) return stage.status();
    Instruction instruction;
    instruction.op = op;
    instruction.stage = *stage;
    instruction.microbatch = action.microbatch;
    if (op == InstructionOp::kBackward || op == InstructionOp::kBackwardInput) program_.hasBackward = true;
    if (op == InstructionOp::kBackwardInput) program_.stages[*stage].splitsBackward = true;
    program_.instructions.push_back(instruction);
    program_.labels.push_back(toString(action));
    return Status::ok();
  }

  Status addPost(const Action& action, std::span<const Action> parts) {
    Instruction instruction;
    instruction.op = InstructionOp::kPost;
    instruction.firstTransfer = static_cast<std::uint32_t>(program_.transfers.size());
    instruction.numTransfers = static_cast<std::uint32_t>(parts.size());
    instruction.peer = -1;
    for (const Action& part : parts) {
      Result<std::int32_t> stage = localStage(part);
      if (!stage) return stage.status();
      const std::int32_t edge = edgeOf(graph_, part);
      if (edge == StageGraph::kNoEdge || peerRank(plan_, part) == program_.rank) {
        return Status::invalidArgument("action " + toString(part) + " of rank " + std::to_string(program_.rank) +
                                       ": there is no stage on another rank to talk to");
      }
      if (instruction.peer >= 0 && instruction.peer != peerRank(plan_, part)) {
        return Status::invalidArgument("action " + toString(action) + ": expected a single peer in a batch");
      }
      instruction.peer = peerRank(plan_, part);
      const ProgramStage& own = program_.stages[*stage];
      const std::int32_t link = findLink(isWhereEdgeBegins(part.kind) ? own.outOf : own.into, edge);
      program_.transfers.push_back({part.kind, *stage, part.microbatch, link});
    }
    program_.instructions.push_back(instruction);
    program_.labels.push_back(toString(action));
    return Status::ok();
  }

  void markLastBackwards() {
    std::vector<bool> ended(program_.stages.size(), false), inputsEnded(program_.stages.size(), false);
    for (std::size_t i = program_.instructions.size(); i-- > 0;) {
      Instruction& instruction = program_.instructions[i];
      const bool isWhole = instruction.op == InstructionOp::kBackward;
      if ((isWhole || instruction.op == InstructionOp::kBackwardWeight) && !ended[instruction.stage]) {
        ended[instruction.stage] = instruction.lastBackward = true;
      }
      if ((isWhole || instruction.op == InstructionOp::kBackwardInput) && !inputsEnded[instruction.stage]) {
        inputsEnded[instruction.stage] = instruction.lastInputBackward = true;
      }
    }
  }

  void markArrived() {
    std::map<std::pair<std::int32_t, std::int32_t>, std::vector<SentGradient>> arrived;  // by stage and microbatch
    for (std::size_t stage = 0; stage < program_.stages.size(); ++stage) {
      const std::vector<StageLink>& into = program_.stages[stage].into;
      for (std::size_t link = 0; link < into.size(); ++link) {
        if (into[link].isLocal()) continue;
        std::vector<SentGradient> taken;
        for (const Action& action : plan_.ranks[into[link].rank]) {
          for (const Action& leaf : leaves(action)) {
            if (leaf.stage != into[link].other) continue;
            if (isInputBackward(leaf.kind)) {
              taken.push_back({leaf.microbatch, static_cast<std::int32_t>(link)});
            } else if (leaf.kind == ActionKind::kSendF && edgeOf(graph_, leaf) == into[link].edge) {
              std::vector<SentGradient>& before = arrived[{static_cast<std::int32_t>(stage), leaf.microbatch}];
              before.insert(before.end(), taken.begin(), taken.end());
              taken.clear();
            }
          }
        }
      }
    }
    for (Instruction& instruction : program_.instructions) {
      if (instruction.op != InstructionOp::kForward) continue;
      const std::vector<SentGradient>& before = arrived[{instruction.stage, instruction.microbatch}];
      instruction.firstArrived = static_cast<std::uint32_t>(program_.arrived.size());
      instruction.numArrived = static_cast<std::uint32_t>(before.size());
      program_.arrived.insert(program_.arrived.end(), before.begin(), before.end());
    }
  }

  const Plan& plan_;
  const StageGraph& graph_;
  Program program_;
};

}  // namespace

std::vector<int> Program::peers() const {
  std::set<int> found;
  for (const Instruction& instruction : instructions) {
    if (instruction.op == InstructionOp::kPost) found.insert(instruction.peer);
  }
  return {found.begin(), found.end()};
}

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
  const Result<StageGraph> graph = StageGraph::make(plan);
  if (!graph) return graph.status();
  if (graph->numEdges() > kMaxEdges) {
    return Status::invalidArgument("the plan has " + std::to_string(graph->numEdges()) +
                                   " edges between stages, expected at most " + std::to_string(kMaxEdges));
  }
  return Compiler(plan, *graph, rank).run();
}

}  // namespace farandole::pipeline
