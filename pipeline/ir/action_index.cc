#include "pipeline/ir/action_index.h"

#include <algorithm>
#include <string>
#include <utility>

#include "pipeline/ir/action_check.h"
#include "pipeline/ir/message.h"
#include "pipeline/ir/text.h"

namespace farandole::pipeline {
namespace {

// Names a forward that is missing; keeps a plan that merely claims billions of microbatches from being indexed.
Status checkForwards(const Plan& plan) {
  const auto keyOf = [&](std::int32_t stage, std::int32_t microbatch) {
    return std::int64_t{stage} * plan.numMicrobatches + microbatch;
  };
  std::vector<std::int64_t> found;
  for (const std::vector<Action>& actions : plan.ranks) {
    for (const Action& action : actions) {
      for (const Action& leaf : leaves(action)) {
        if (isForward(leaf.kind)) found.push_back(keyOf(leaf.stage, leaf.microbatch));
      }
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  auto next = found.begin();
  for (std::int32_t stage = 0; stage < plan.numStages; ++stage) {
    const MicrobatchRange range = plan.microbatchesOf(stage);
    for (std::int32_t microbatch = range.begin; microbatch < range.end; ++microbatch, ++next) {
      if (next != found.end() && *next == keyOf(stage, microbatch)) continue;
      return Status::invalidArgument("stage " + std::to_string(stage) + ", microbatch " + std::to_string(microbatch) +
                                     ": the forward is missing; expected every stage to run every microbatch" +
                                     (plan.microbatchesOfStage.empty() ? "" : " of its own"));
    }
  }
  return Status::ok();
}

}  // namespace

ActionIndex::ActionIndex(const Plan& plan, StageGraph graph)
    : graph_(std::move(graph)), numMicrobatches_(plan.numMicrobatches), firstSlot_{} {
  std::size_t numSlots = 0;
  for (std::size_t kind = 0; kind < kNumKinds; ++kind) {
    firstSlot_[kind] = numSlots;
    const std::int32_t rows = isMessage(static_cast<ActionKind>(kind)) ? graph_.numEdges() : plan.numStages;
    numSlots += static_cast<std::size_t>(rows) * static_cast<std::size_t>(numMicrobatches_);
  }
  steps_.assign(numSlots, kAbsent);
}

std::size_t ActionIndex::slot(const Action& action) const {
  return slot(action.kind, isMessage(action.kind) ? edgeOf(graph_, action) : action.stage, action.microbatch);
}

std::int32_t ActionIndex::step(const Action& action) const { return steps_[slot(action)]; }

Status ActionIndex::add(const Plan& plan, const Action& leaf, std::int32_t rank, std::int32_t step) {
  if (static_cast<std::size_t>(leaf.kind) >= kNumKinds) return Status::ok();
  std::int32_t& entry = steps_[slot(leaf)];
  if (entry != kAbsent) {
    return Status::invalidArgument(describeStep(plan, rank, step) + ": " + toString(leaf) + " is already in step " +
                                   std::to_string(entry) + "; expected it once");
  }
  entry = step;
  hasBackward_ |= isInputBackward(leaf.kind) || isWeightBackward(leaf.kind);
  return Status::ok();
}

std::int32_t ActionIndex::inputBackwardStep(std::int32_t stage, std::int32_t microbatch) const {
  const std::int32_t full = step(ActionKind::kBackward, stage, microbatch);
  return full != kAbsent ? full : step(ActionKind::kBackwardInput, stage, microbatch);
}

Result<ActionIndex> ActionIndex::build(const Plan& plan) {
  FARANDOLE_RETURN_IF_ERROR(checkFrame(plan));
  Result<StageGraph> graph = StageGraph::make(plan);
  if (!graph) return graph.status();
  for (std::int32_t rank = 0; rank < plan.numRanks(); ++rank) {
    for (std::size_t step = 0; step < plan.ranks[rank].size(); ++step) {
      FARANDOLE_RETURN_IF_ERROR(checkAction(plan, *graph, rank, static_cast<std::int32_t>(step)));
    }
  }
  FARANDOLE_RETURN_IF_ERROR(checkForwards(plan));
  ActionIndex index(plan, std::move(*graph));
  for (std::int32_t rank = 0; rank < plan.numRanks(); ++rank) {
    for (std::int32_t step = 0; const Action& action : plan.ranks[rank]) {
      for (const Action& leaf : leaves(action)) FARANDOLE_RETURN_IF_ERROR(index.add(plan, leaf, rank, step));
      ++step;
    }
  }
  return index;
}

}  // namespace farandole::pipeline
