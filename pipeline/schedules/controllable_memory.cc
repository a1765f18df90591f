#include "pipeline/schedules/controllable_memory.h"

#include <string>

#include "pipeline/schedules/building_block.h"
#include "pipeline/schedules/placement.h"
#include "pipeline/schedules/squeeze.h"

namespace farandole::pipeline {
namespace {

Result<Plan> make(std::string_view schedule, const BuildingBlock::Pace& pace, const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkTwoStagesPerRank(schedule, options));
  const auto block = BuildingBlock::make(pace, options.numRanks);
  if (!block) return refuse(schedule, "numRanks", options.numRanks, "one for which there is a building block");
  return options.forwardOnly ? forwardsOf(repeat(*block, options)) : squeeze(*block, options);
}

}  // namespace

Result<Plan> makeVMin(const ScheduleOptions& options) { return make("V-Min", {1, 1, 1, 1}, options); }

Result<Plan> makeVHalf(const ScheduleOptions& options) { return make("V-Half", {2, 1, 2, 1}, options); }

}  // namespace farandole::pipeline
