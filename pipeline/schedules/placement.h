#pragma once

#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// A plan without actions whose stages form a V: two on each rank, rank r owns r and 2 numRanks - 1 - r. The last stage
// is on the first rank, and so is the loss.
Plan makeVPlan(const ScheduleOptions& options);

// That all counts are at least 1, and that there are two stages for each rank.
Status checkTwoStagesPerRank(std::string_view schedule, const ScheduleOptions& options);

}  // namespace farandole::pipeline
