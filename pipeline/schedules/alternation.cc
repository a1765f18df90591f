#include "pipeline/schedules/alternation.h"

#include <algorithm>

namespace farandole::pipeline {

std::vector<Action> toActions(const Alternation& alternation) {
  std::vector<Action> actions;
  const auto add = [&](ActionKind kind, const Turn& turn) {
    actions.push_back({turn.stage, kind, turn.microbatch, {}});
  };
  const std::vector<Turn>& backwards = alternation.backwards;
  const std::size_t numForwards = alternation.forwards.size();
  const std::size_t warmup = std::min(numForwards, static_cast<std::size_t>(alternation.warmup));
  const auto delay = static_cast<std::size_t>(alternation.weightDelay);
  const ActionKind kind = alternation.isSplit ? ActionKind::kBackwardInput : ActionKind::kBackward;
  const auto addBackward = [&](std::size_t i) {
    add(kind, backwards[i]);
    if (alternation.isSplit && i >= delay) add(ActionKind::kBackwardWeight, backwards[i - delay]);
  };
  for (std::size_t i = 0; i < numForwards; ++i) {
    add(ActionKind::kForward, alternation.forwards[i]);
    if (i >= warmup && !backwards.empty()) addBackward(i - warmup);
  }
  if (backwards.empty()) return actions;
  for (std::size_t i = numForwards - warmup; i < backwards.size(); ++i) addBackward(i);
  if (!alternation.isSplit) return actions;
  for (std::size_t i = backwards.size() - std::min(delay, backwards.size()); i < backwards.size(); ++i) {
    add(ActionKind::kBackwardWeight, backwards[i]);
  }
  return actions;
}

std::vector<Turn> turnsByGroup(const std::vector<std::int32_t>& stages, const std::vector<std::int32_t>& groups) {
  std::vector<Turn> turns;
  std::int32_t first = 0;
  for (const std::int32_t group : groups) {
    for (const std::int32_t stage : stages) {
      for (std::int32_t microbatch = first; microbatch < first + group; ++microbatch) {
        turns.push_back({stage, microbatch});
      }
    }
    first += group;
  }
  return turns;
}

}  // namespace farandole::pipeline
