#include "pipeline/ir/memory_use.h"

#include <algorithm>

#include "pipeline/ir/action_kind.h"

namespace farandole::pipeline {
namespace {

bool hasBackward(const std::vector<Action>& actions) {
  return std::ranges::any_of(actions, [](const Action& action) {
    return std::ranges::any_of(leaves(action), [](const Action& leaf) { return isInputBackward(leaf.kind); });
  });
}

// What the action frees once it is done.
double freedBy(ActionKind kind, const StageMemory& stage) {
  switch (kind) {
    case ActionKind::kBackward: return stage.activations;
    case ActionKind::kBackwardInput: return stage.activations - stage.forWeights;
    case ActionKind::kBackwardWeight: return stage.forWeights;
    default: return 0;
  }
}

}  // namespace

std::vector<double> peakMemory(const Plan& plan, const std::vector<StageMemory>& stages) {
  std::vector<double> peaks;
  for (const std::vector<Action>& actions : plan.ranks) {
    double held = 0;
    double peak = 0;
    for (const Action& action : hasBackward(actions) ? actions : std::vector<Action>()) {
      for (const Action& leaf : leaves(action)) held += isForward(leaf.kind) ? stages[leaf.stage].activations : 0;
      peak = std::max(peak, held);
      for (const Action& leaf : leaves(action)) {
        if (isCompute(leaf.kind)) held -= freedBy(leaf.kind, stages[leaf.stage]);
      }
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace farandole::pipeline
