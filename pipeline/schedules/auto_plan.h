#pragma once

#include <optional>
#include <string>
#include <vector>

#include "pipeline/schedules/list_schedule.h"

namespace farandole::pipeline {

struct PlanCandidate {
  std::string name;       // of a schedule, or how it was searched for
  double makespan = 0;    // seconds, by simulation
  double peakMemory = 0;  // bytes on the rank that holds most
  bool fits = false;
};

struct AutoPlan {
  Plan plan;
  PlanCandidate chosen;
  std::vector<PlanCandidate> candidates;  // the fastest first
  std::string reason;                     // for people
};

// The fastest plan found, by simulation, that holds no more than the limit: of all schedules that can run these counts,
// each with its options, and of plans made by list scheduling (listSchedule()). `rankOfStage`: where the stages are, or
// none: they may go round the ranks, and with two on each rank also form a V. kInvalidArgument: costs that do not fit
// the counts, or no plan that fits the memory; the error names the one that needs least.
Result<AutoPlan> makeAutoPlan(const ScheduleOptions& options, const MeasuredCosts& costs,
                              const std::optional<std::vector<std::int32_t>>& rankOfStage = std::nullopt);

}  // namespace farandole::pipeline
