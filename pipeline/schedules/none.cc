#include "pipeline/schedules/none.h"

namespace farandole::pipeline {

Result<Plan> makeNone(const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkEqualStagesPerRank("none", options));
  Plan plan = makeLoopPlan(options);
  for (std::int32_t microbatch = 0; microbatch < options.numMicrobatches; ++microbatch) {
    for (std::int32_t stage = 0; stage < options.numStages; ++stage) {
      plan.ranks[plan.rankOfStage[stage]].push_back({stage, ActionKind::kForward, microbatch, {}});
    }
    if (options.forwardOnly) continue;
    for (std::int32_t stage = options.numStages - 1; stage >= 0; --stage) {
      plan.ranks[plan.rankOfStage[stage]].push_back({stage, ActionKind::kBackward, microbatch, {}});
    }
  }
  return plan;
}

}  // namespace farandole::pipeline
