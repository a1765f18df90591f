#pragma once

#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// ZB-V (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 6): two
// stages on each of p ranks in the form of a V, I and W apart. With F = I = W and
// m >= 2 p - 1 no rank waits between its first action and its last, which is
// 6 m F later; every rank holds the activations of 2 p microbatches of a stage,
// as much as with 1F1B at most. Fewer microbatches run, with bubbles.
Result<Plan> makeZbv(const ScheduleOptions& options);

}  // namespace farandole::pipeline
