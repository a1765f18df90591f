#include "pipeline/ir/plan_ends.h"

#include <algorithm>
#include <string>

#include "pipeline/ir/stage_graph.h"

namespace farandole::pipeline {

Result<PlanEnds> PlanEnds::of(const Plan& plan) {
  const Result<StageGraph> graph = StageGraph::make(plan);
  if (!graph) return graph.status();
  constexpr std::int32_t kNone = -1;
  std::vector<std::int32_t> endsIn(plan.numMicrobatches, kNone);
  PlanEnds ends;
  for (std::int32_t stage = 0; stage < plan.numStages; ++stage) {
    ends.isFirst_.push_back(graph->into(stage).empty());
    ends.last_.push_back(graph->outOf(stage).empty() ? plan.microbatchesOf(stage) : MicrobatchRange{});
    for (std::int32_t i = ends.last_[stage].begin; i < ends.last_[stage].end; ++i) {
      if (endsIn[i] != kNone) {
        return Status::invalidArgument("microbatch " + std::to_string(i) + " ends in stages " +
                                       std::to_string(endsIn[i]) + " and " + std::to_string(stage) +
                                       ", expected one last stage for each, which computes its loss");
      }
      endsIn[i] = stage;
    }
  }
  return ends;
}

Result<std::int32_t> PlanEnds::microbatchesOfOneModel() const {
  std::int32_t count = 0;
  for (const MicrobatchRange& range : last_) {
    if (range.size() == 0 || range.size() == count) continue;
    if (count != 0) {
      return Status::invalidArgument("the last stages run " + std::to_string(count) + " and " +
                                     std::to_string(range.size()) +
                                     " microbatches, expected equally many, or gradients that are not scaled");
    }
    count = range.size();
  }
  return count;
}

std::vector<std::int32_t> PlanEnds::microbatchesThatEndIn(std::span<const std::int32_t> stages) const {
  std::vector<std::int32_t> microbatches;
  for (const std::int32_t stage : stages) {
    for (std::int32_t i = last_[stage].begin; i < last_[stage].end; ++i) microbatches.push_back(i);
  }
  std::ranges::sort(microbatches);
  return microbatches;
}

}  // namespace farandole::pipeline
