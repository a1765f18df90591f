#pragma once

#include <string_view>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"
#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// The compute plan of the schedule of that name, upper or lower case alike.
Result<Plan> makePlan(std::string_view name, const ScheduleOptions& options);

// The names that makePlan() knows, as their papers write them.
std::vector<std::string_view> scheduleNames();

}  // namespace farandole::pipeline
