#include "pipeline/schedules/placement.h"

#include <string>

namespace farandole::pipeline {

Plan makeVPlan(const ScheduleOptions& options) {
  Plan plan;
  plan.numStages = options.numStages;
  plan.numMicrobatches = options.numMicrobatches;
  plan.edges = options.edges;
  for (std::int32_t stage = 0; stage < options.numStages; ++stage) {
    plan.rankOfStage.push_back(stage < options.numRanks ? stage : options.numStages - 1 - stage);
  }
  plan.ranks.resize(options.numRanks);
  return plan;
}

Status checkTwoStagesPerRank(std::string_view schedule, const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkCounts(schedule, options));
  if (options.numStages == 2 * options.numRanks) return Status::ok();
  return refuse(schedule, "numStages", options.numStages,
                "two for each rank, 2 numRanks = " + std::to_string(2 * options.numRanks));
}

}  // namespace farandole::pipeline
