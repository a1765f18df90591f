#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "pipeline/ir/memory_use.h"
#include "pipeline/ir/simulate.h"
#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// What a plan is made for, as measured.
struct MeasuredCosts {
  SimulationCosts times;
  std::vector<StageMemory> memory;                               // one for each stage
  double memoryLimit = std::numeric_limits<double>::infinity();  // bytes on each rank
};

// How a rank chooses among what it could do next. Backwards come first, since they free memory.
struct Preference {
  bool splitsBackward = false;    // I and W apart; a W fills the time in which nothing else is there, or makes room
  bool latestStageFirst = false;  // of two forwards the one that is nearer to the loss, else the older microbatch's
};

// A plan made by going through the step as it would run: a rank that is free does what it prefers of what is there, and
// waits where nothing is. Never more than the limit is held. None where that cannot go on.
std::optional<Plan> listSchedule(const ScheduleOptions& options, const std::vector<std::int32_t>& rankOfStage,
                                 const MeasuredCosts& costs, const Preference& preference);

}  // namespace farandole::pipeline
