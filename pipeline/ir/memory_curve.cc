#include "pipeline/ir/memory_curve.h"

#include <algorithm>
#include <string>

#include "pipeline/ir/action_kind.h"

namespace farandole::pipeline {
namespace {

Status checkStages(const RankTimeline& rank, std::size_t numStages) {
  for (const TimedAction& timed : rank.actions) {
    for (const Action& leaf : leaves(timed.action)) {
      if (static_cast<std::size_t>(leaf.stage) < numStages) continue;
      return Status::invalidArgument("memory has " + std::to_string(numStages) +
                                     " entries; expected one for each stage, and there is a stage " +
                                     std::to_string(leaf.stage));
    }
  }
  return Status::ok();
}

MemoryCurve curveOf(const RankTimeline& rank, const std::vector<StageMemory>& stages) {
  MemoryCurve curve{{{0, 0}}, 0};
  if (std::ranges::none_of(rank.actions, hasInputBackward, &TimedAction::action)) return curve;
  const auto change = [&](double time, double bytes) {
    if (bytes != 0) curve.points.push_back({time, curve.points.back().bytes + bytes});
    curve.peak = std::max(curve.peak, curve.points.back().bytes);
  };
  for (const TimedAction& timed : rank.actions) {
    change(timed.start, memoryTaken(timed.action, stages));
    change(timed.end, -memoryFreed(timed.action, stages));
  }
  return curve;
}

}  // namespace

Result<std::vector<MemoryCurve>> memoryOverTime(const SimulationResult& step, const std::vector<StageMemory>& stages) {
  std::vector<MemoryCurve> curves;
  for (const RankTimeline& rank : step.ranks) {
    FARANDOLE_RETURN_IF_ERROR(checkStages(rank, stages.size()));
    curves.push_back(curveOf(rank, stages));
  }
  return curves;
}

}  // namespace farandole::pipeline
