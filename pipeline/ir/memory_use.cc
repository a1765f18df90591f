#include "pipeline/ir/memory_use.h"

#include <algorithm>

#include "pipeline/ir/action_kind.h"

namespace farandole::pipeline {
namespace {

double freedBy(ActionKind kind, const StageMemory& stage) {
  switch (kind) {
    case ActionKind::kBackward: return stage.activations;
    case ActionKind::kBackwardInput: return stage.activations - stage.forWeights;
    case ActionKind::kBackwardWeight: return stage.forWeights;
    default: return 0;
  }
}

}  // namespace

double memoryTaken(const Action& action, const std::vector<StageMemory>& stages) {
  double taken = 0;
  for (const Action& leaf : leaves(action)) taken += isForward(leaf.kind) ? stages[leaf.stage].activations : 0;
  return taken;
}

double memoryFreed(const Action& action, const std::vector<StageMemory>& stages) {
  double freed = 0;
  for (const Action& leaf : leaves(action)) {
    if (isCompute(leaf.kind)) freed += freedBy(leaf.kind, stages[leaf.stage]);
  }
  return freed;
}

std::vector<double> peakMemory(const Plan& plan, const std::vector<StageMemory>& stages) {
  std::vector<double> peaks;
  for (const std::vector<Action>& actions : plan.ranks) {
    double held = 0;
    double peak = 0;
    for (const Action& action : std::ranges::any_of(actions, hasInputBackward) ? actions : std::vector<Action>()) {
      held += memoryTaken(action, stages);
      peak = std::max(peak, held);
      held -= memoryFreed(action, stages);
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace farandole::pipeline
