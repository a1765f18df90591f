#include "pipeline/schedules/one_f_one_b.h"

#include "pipeline/schedules/alternation.h"

namespace farandole::pipeline {

Result<Plan> makeOneFOneB(const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkOneStagePerRank("1F1B", options));
  if (options.warmupPerStage < 1) return refuse("1F1B", "warmupPerStage", options.warmupPerStage, "at least 1");
  Plan plan = makeLoopPlan(options);
  for (std::int32_t rank = 0; rank < options.numRanks; ++rank) {
    Alternation order;
    order.forwards = turnsByGroup({rank}, {options.numMicrobatches});
    if (!options.forwardOnly) order.backwards = order.forwards;
    order.warmup = options.warmupPerStage * (options.numStages - rank - 1);
    plan.ranks[rank] = toActions(order);
  }
  return plan;
}

}  // namespace farandole::pipeline
