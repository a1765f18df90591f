#include "pipeline/ir/action_check.h"

#include "pipeline/ir/message.h"
#include "pipeline/ir/text.h"

namespace farandole::pipeline {
namespace {

Status refuse(const Plan& plan, std::int32_t rank, std::int32_t step, const std::string& why) {
  return Status::invalidArgument(describeStep(plan, rank, step) + ": " + why);
}

Status checkMessage(const Plan& plan, const StageGraph& graph, const Action& leaf, std::int32_t rank,
                    std::int32_t step) {
  if (leaf.other != kNeighbour && leaf.other == neighbourOf(leaf.kind, leaf.stage)) {
    return refuse(plan, rank, step,
                  toString(leaf) + " names stage " + std::to_string(leaf.other) +
                      ", which is the one that is meant where none is named; expected no name");
  }
  const std::int32_t other = otherStage(leaf);
  const std::int32_t edge = other < 0 || other >= plan.numStages ? StageGraph::kNoEdge : edgeOf(graph, leaf);
  if (edge != StageGraph::kNoEdge && crossesRanks(plan, graph.edge(edge))) return Status::ok();
  return refuse(plan, rank, step,
                toString(leaf) +
                    " has no other rank to talk to; expected messages only between neighbouring "
                    "stages on different ranks");
}

Status checkLeaf(const Plan& plan, const StageGraph& graph, const Action& leaf, std::int32_t rank, std::int32_t step) {
  if (leaf.stage < 0 || leaf.stage >= plan.numStages) {
    return refuse(plan, rank, step,
                  "stage " + std::to_string(leaf.stage) + " is out of range; expected 0 to " +
                      std::to_string(plan.numStages - 1));
  }
  if (plan.rankOfStage[leaf.stage] != rank) {
    return refuse(plan, rank, step,
                  "stage " + std::to_string(leaf.stage) + " belongs to rank " +
                      std::to_string(plan.rankOfStage[leaf.stage]) + "; expected its actions there");
  }
  if (!isMessage(leaf.kind) && leaf.other != kNeighbour) {
    return refuse(plan, rank, step,
                  "stage " + std::to_string(leaf.other) + " given as the other one; expected it of sends and receives");
  }
  if (!hasMicrobatch(leaf.kind)) {
    if (leaf.microbatch == kNoMicrobatch) return Status::ok();
    return refuse(plan, rank, step, "microbatch " + std::to_string(leaf.microbatch) + " given; expected none");
  }
  if (leaf.microbatch < 0 || leaf.microbatch >= plan.numMicrobatches) {
    return refuse(plan, rank, step,
                  "microbatch " + std::to_string(leaf.microbatch) + " is out of range; expected 0 to " +
                      std::to_string(plan.numMicrobatches - 1));
  }
  const MicrobatchRange range = plan.microbatchesOf(leaf.stage);
  if (!range.contains(leaf.microbatch)) {
    return refuse(plan, rank, step,
                  "microbatch " + std::to_string(leaf.microbatch) + " is not the stage's; expected " +
                      std::to_string(range.begin) + " to " + std::to_string(range.end - 1));
  }
  return isMessage(leaf.kind) ? checkMessage(plan, graph, leaf, rank, step) : Status::ok();
}

Status checkParts(const Plan& plan, const Action& action, std::int32_t rank, std::int32_t step) {
  const bool isBatch = action.kind == ActionKind::kBatchP2p;
  if (action.parts.empty()) return refuse(plan, rank, step, "it has no parts; expected at least one");
  for (const Action& part : action.parts) {
    const bool fits = isBatch ? isMessage(part.kind) : isCompute(part.kind) && !isComposite(part.kind);
    if (fits) continue;
    return refuse(plan, rank, step,
                  "part " + toString(part) + " does not belong; expected " +
                      (isBatch ? "sends and receives" : "F, B, I and W") + " only");
  }
  return Status::ok();
}

Status checkBatchPeer(const Plan& plan, const Action& batch, std::int32_t rank, std::int32_t step) {
  const std::int32_t peer = peerRank(plan, batch.parts.front());
  for (const Action& part : batch.parts) {
    if (peerRank(plan, part) == peer) continue;
    return refuse(plan, rank, step,
                  toString(part) + " is with rank " + std::to_string(peerRank(plan, part)) +
                      ", the parts before with " + std::to_string(peer) + "; expected one peer per batch");
  }
  return Status::ok();
}

Status checkMicrobatches(const Plan& plan) {
  const std::vector<MicrobatchRange>& ranges = plan.microbatchesOfStage;
  if (!ranges.empty() && ranges.size() != static_cast<std::size_t>(plan.numStages)) {
    return Status::invalidArgument("microbatchesOfStage has " + std::to_string(ranges.size()) +
                                   " entries; expected none, or one per stage, " + std::to_string(plan.numStages));
  }
  for (std::size_t stage = 0; stage < ranges.size(); ++stage) {
    const auto [begin, end] = ranges[stage];
    if (begin >= 0 && begin < end && end <= plan.numMicrobatches) continue;
    return Status::invalidArgument("microbatchesOfStage has " + std::to_string(begin) + " to before " +
                                   std::to_string(end) + " for stage " + std::to_string(stage) +
                                   "; expected at least one of 0 to " + std::to_string(plan.numMicrobatches - 1));
  }
  return Status::ok();
}

}  // namespace

std::string describeStep(const Plan& plan, std::int32_t rank, std::int32_t step) {
  return "rank " + std::to_string(rank) + ", step " + std::to_string(step) + " (" + toString(plan.ranks[rank][step]) +
         ")";
}

Status checkFrame(const Plan& plan) {
  if (plan.numStages < 1) {
    return Status::invalidArgument("numStages is " + std::to_string(plan.numStages) + "; expected at least 1");
  }
  if (plan.numMicrobatches < 1) {
    return Status::invalidArgument("numMicrobatches is " + std::to_string(plan.numMicrobatches) +
                                   "; expected at least 1");
  }
  if (plan.rankOfStage.size() != static_cast<std::size_t>(plan.numStages)) {
    return Status::invalidArgument("rankOfStage has " + std::to_string(plan.rankOfStage.size()) +
                                   " entries; expected one per stage, " + std::to_string(plan.numStages));
  }
  for (std::int32_t stage = 0; stage < plan.numStages; ++stage) {
    const std::int32_t rank = plan.rankOfStage[stage];
    if (rank < 0 || rank >= plan.numRanks()) {
      return Status::invalidArgument("rankOfStage places stage " + std::to_string(stage) + " on rank " +
                                     std::to_string(rank) + "; expected 0 to " + std::to_string(plan.numRanks() - 1));
    }
  }
  return checkMicrobatches(plan);
}

Status checkAction(const Plan& plan, const StageGraph& graph, std::int32_t rank, std::int32_t step) {
  const Action& action = plan.ranks[rank][step];
  if (isComposite(action.kind)) FARANDOLE_RETURN_IF_ERROR(checkParts(plan, action, rank, step));
  for (const Action& leaf : leaves(action)) FARANDOLE_RETURN_IF_ERROR(checkLeaf(plan, graph, leaf, rank, step));
  if (action.kind == ActionKind::kBatchP2p) FARANDOLE_RETURN_IF_ERROR(checkBatchPeer(plan, action, rank, step));
  return Status::ok();
}

}  // namespace farandole::pipeline
