#include "pipeline/ir/action_index.h"

#include <algorithm>

#include "pipeline/ir/action_check.h"
#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/text.h"

namespace farandole::pipeline {
namespace {

// The kinds that are indexed come first in the enumeration.
constexpr std::size_t kNumIndexedKinds = static_cast<std::size_t>(ActionKind::kRecvB) + 1;

bool isIndexed(ActionKind kind) { return static_cast<std::size_t>(kind) < kNumIndexedKinds; }

// Names a forward that is missing when there are too few; keeps a plan that
// merely claims billions of microbatches from being indexed.
Status checkForwardCount(const Plan& plan) {
  const std::int64_t expected = std::int64_t{plan.numStages} * plan.numMicrobatches;
  std::vector<std::int64_t> found;
  for (const std::vector<Action>& actions : plan.ranks) {
    for (const Action& action : actions) {
      for (const Action& leaf : leaves(action)) {
        if (isForward(leaf.kind)) found.push_back(std::int64_t{leaf.stage} * plan.numMicrobatches + leaf.microbatch);
      }
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  if (static_cast<std::int64_t>(found.size()) >= expected) return Status::ok();
  std::int64_t missing = 0;
  for (std::int64_t key : found) {
    if (key == missing) ++missing;
  }
  return Status::invalidArgument("stage " + std::to_string(missing / plan.numMicrobatches) + ", microbatch " +
                                 std::to_string(missing % plan.numMicrobatches) +
                                 ": the forward is missing; expected every stage to run every microbatch");
}

}  // namespace

ActionIndex::ActionIndex(std::int32_t numStages, std::int32_t numMicrobatches)
    : numStages_(numStages),
      numMicrobatches_(numMicrobatches),
      steps_(kNumIndexedKinds * static_cast<std::size_t>(numStages) * static_cast<std::size_t>(numMicrobatches),
             kAbsent) {}

std::size_t ActionIndex::slot(ActionKind kind, std::int32_t stage, std::int32_t microbatch) const {
  const std::size_t row =
      static_cast<std::size_t>(kind) * static_cast<std::size_t>(numStages_) + static_cast<std::size_t>(stage);
  return row * static_cast<std::size_t>(numMicrobatches_) + static_cast<std::size_t>(microbatch);
}

Status ActionIndex::add(const Plan& plan, const Action& leaf, std::int32_t rank, std::int32_t step) {
  if (!isIndexed(leaf.kind)) return Status::ok();
  std::int32_t& entry = steps_[slot(leaf.kind, leaf.stage, leaf.microbatch)];
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
  for (std::int32_t rank = 0; rank < plan.numRanks(); ++rank) {
    for (std::size_t step = 0; step < plan.ranks[rank].size(); ++step) {
      FARANDOLE_RETURN_IF_ERROR(checkAction(plan, rank, static_cast<std::int32_t>(step)));
    }
  }
  FARANDOLE_RETURN_IF_ERROR(checkForwardCount(plan));
  ActionIndex index(plan.numStages, plan.numMicrobatches);
  for (std::int32_t rank = 0; rank < plan.numRanks(); ++rank) {
    for (std::int32_t step = 0; const Action& action : plan.ranks[rank]) {
      for (const Action& leaf : leaves(action)) FARANDOLE_RETURN_IF_ERROR(index.add(plan, leaf, rank, step));
      ++step;
    }
  }
  return index;
}

}  // namespace farandole::pipeline
