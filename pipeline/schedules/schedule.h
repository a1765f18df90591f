#pragma once

#include <cstdint>
#include <string_view>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// What every schedule is made for.
struct ScheduleOptions {
  std::int32_t numRanks = 1;
  std::int32_t numStages = 1;
  std::int32_t numMicrobatches = 1;
  bool forwardOnly = false;
};

// A schedule: options to a plan of compute actions only.
using ScheduleGenerator = Result<Plan> (*)(const ScheduleOptions&);

// That all counts are at least 1; `schedule` is named in the error.
Status checkCounts(std::string_view schedule, const ScheduleOptions& options);

// The same, and that there is one stage per rank.
Status checkOneStagePerRank(std::string_view schedule, const ScheduleOptions& options);

// A plan without actions in which rank i owns stage i. There must be as many ranks as stages.
Plan makeEmptyPlan(const ScheduleOptions& options);

}  // namespace farandole::pipeline
