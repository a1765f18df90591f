#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "pipeline/ir/simulate.h"
#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// How many stages each rank may have.
struct Shapes {
  std::int32_t fewestStagesPerRank = 1;
  std::int32_t mostStagesPerRank = 1;
  std::int32_t fewestMicrobatches = 1;  // for each rank
};

// Calls check(options, plan, simulated) for p = 1, 2, 4, 8, 16, m to 8 p, and v; F, I and W take 1 each, B 2.
// That the plan can run, and after lowering on a transport that keeps the order of each edge, is checked before.
using CheckSchedule = std::function<void(const ScheduleOptions&, const Plan&, const SimulationResult&)>;
void checkSchedule(std::string_view name, const Shapes& shapes, const CheckSchedule& check);

}  // namespace farandole::pipeline
