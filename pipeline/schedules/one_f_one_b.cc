#include "pipeline/schedules/one_f_one_b.h"

#include <algorithm>

namespace farandole::pipeline {

Result<Plan> makeOneFOneB(const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkOneStagePerRank("1F1B", options));
  Plan plan = makeEmptyPlan(options);
  for (std::int32_t rank = 0; rank < options.numRanks; ++rank) {
    std::vector<Action>& actions = plan.ranks[rank];
    const std::int32_t warmup = std::min(options.numMicrobatches, options.numStages - rank - 1);
    for (std::int32_t microbatch = 0; microbatch < options.numMicrobatches; ++microbatch) {
      actions.push_back({rank, ActionKind::kForward, microbatch, {}});
      if (options.forwardOnly || microbatch < warmup) continue;
      actions.push_back({rank, ActionKind::kBackward, microbatch - warmup, {}});
    }
    if (options.forwardOnly) continue;
    for (std::int32_t microbatch = options.numMicrobatches - warmup; microbatch < options.numMicrobatches;
         ++microbatch) {
      actions.push_back({rank, ActionKind::kBackward, microbatch, {}});
    }
  }
  return plan;
}

}  // namespace farandole::pipeline
