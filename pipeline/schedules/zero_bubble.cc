#include "pipeline/schedules/zero_bubble.h"

#include "pipeline/schedules/interleaving.h"

namespace farandole::pipeline {
namespace {

// The warm-up shrinks by `perStage` from rank to rank, and the W, which fill what is left of it, come that much later.
Result<Plan> make(std::string_view schedule, const ScheduleOptions& options, std::int32_t perStage) {
  return interleave(schedule, options, [&](std::int32_t rank, std::int32_t group, Alternation& order) {
    const std::int32_t numLocal = options.numStages / options.numRanks;
    order.warmup = perStage * (options.numRanks - rank - 1) + (numLocal - 1) * group;
    order.isSplit = true;
    order.weightDelay = perStage * rank;
  });
}

}  // namespace

Result<Plan> makeZbH1(const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkOneStagePerRank("ZB-H1", options));
  return make("ZB-H1", options, 1);
}

Result<Plan> makeZbH2(const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkOneStagePerRank("ZB-H2", options));
  return make("ZB-H2", options, 2);
}

Result<Plan> makeInterleavedZeroBubble(const ScheduleOptions& options) {
  return make("InterleavedZeroBubble", options, 1);
}

}  // namespace farandole::pipeline
