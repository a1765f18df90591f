#include "pipeline/schedules/dual_pipe_v.h"

#include <string>

#include "pipeline/schedules/dual_pipe_order.h"
#include "pipeline/schedules/placement.h"

namespace farandole::pipeline {

Result<Plan> makeDualPipeV(const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkTwoStagesPerRank("DualPipeV", options));
  if (options.numMicrobatches < 2 * options.numRanks) {
    return refuse("DualPipeV", "numMicrobatches", options.numMicrobatches,
                  "at least 2 numRanks = " + std::to_string(2 * options.numRanks));
  }
  Plan plan = makeVPlan(options);
  for (std::int32_t r = 0; r < options.numRanks; ++r) {
    const MicrobatchRange all{0, options.numMicrobatches};
    ChunkRank rank({{{r, all}, {options.numStages - 1 - r, all}}}, plan.ranks[r]);
    addDualPipeOrder(rank, options.numRanks, r, options.numMicrobatches);
  }
  return options.forwardOnly ? forwardsOf(std::move(plan)) : plan;
}

}  // namespace farandole::pipeline
