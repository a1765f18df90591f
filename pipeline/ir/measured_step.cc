#include "pipeline/ir/measured_step.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/text.h"

namespace farandole::pipeline {
namespace {

Status checkTimes(const std::vector<TimedAction>& actions) {
  for (const auto& [action, start, end] : actions) {
    if (std::isfinite(start) && std::isfinite(end) && 0 <= start && start <= end) continue;
    return Status::invalidArgument(toString(action) + " lasts from " + std::to_string(start) + " to " +
                                   std::to_string(end) +
                                   " seconds; expected finite times, at least 0, the end not before the start");
  }
  return Status::ok();
}

RankTimeline timelineOf(std::vector<TimedAction> actions) {
  RankTimeline timeline;
  const bool keepsActivations = std::ranges::any_of(actions, hasInputBackward, &TimedAction::action);
  std::int32_t live = 0;
  for (const TimedAction& timed : actions) {
    if (!isCompute(timed.action.kind)) continue;
    timeline.busy += timed.end - timed.start;
    if (!keepsActivations) continue;
    for (const Action& leaf : leaves(timed.action)) live += isForward(leaf.kind) ? 1 : 0;
    timeline.peakLiveActivations = std::max(timeline.peakLiveActivations, live);
    for (const Action& leaf : leaves(timed.action)) live -= isWeightBackward(leaf.kind) ? 1 : 0;
  }
  timeline.actions = std::move(actions);
  return timeline;
}

}  // namespace

Result<SimulationResult> measuredStep(std::vector<std::vector<TimedAction>> ranks) {
  SimulationResult step;
  for (std::vector<TimedAction>& actions : ranks) {
    FARANDOLE_RETURN_IF_ERROR(checkTimes(actions));
    for (const TimedAction& timed : actions) step.makespan = std::max(step.makespan, timed.end);
    step.ranks.push_back(timelineOf(std::move(actions)));
  }
  for (RankTimeline& rank : step.ranks) rank.bubble = step.makespan > 0 ? 1 - rank.busy / step.makespan : 0;
  return step;
}

}  // namespace farandole::pipeline
