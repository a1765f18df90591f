#include "pipeline/schedules/gpipe.h"

namespace farandole::pipeline {

Result<Plan> makeGPipe(const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkOneStagePerRank("GPipe", options));
  Plan plan = makeLoopPlan(options);
  for (std::int32_t rank = 0; rank < options.numRanks; ++rank) {
    std::vector<Action>& actions = plan.ranks[rank];
    for (std::int32_t microbatch = 0; microbatch < options.numMicrobatches; ++microbatch) {
      actions.push_back({rank, ActionKind::kForward, microbatch, {}});
    }
    if (options.forwardOnly) continue;
    for (std::int32_t microbatch = 0; microbatch < options.numMicrobatches; ++microbatch) {
      actions.push_back({rank, ActionKind::kBackward, microbatch, {}});
    }
  }
  return plan;
}

}  // namespace farandole::pipeline
