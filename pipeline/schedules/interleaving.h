#pragma once

#include <functional>

#include "pipeline/schedules/alternation.h"
#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// A plan whose ranks alternate, each over all of its stages, which go round the ranks. `finish` is given what is filled
// in but for the warm-up and for how a backward is split, and the size of the groups.
using FinishAlternation = std::function<void(std::int32_t rank, std::int32_t group, Alternation& order)>;
Result<Plan> interleave(std::string_view schedule, const ScheduleOptions& options, const FinishAlternation& finish);

}  // namespace farandole::pipeline
