#pragma once

#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// Schedules that trade time for memory (Qi et al., "Pipeline Parallelism with
// Controllable Memory", 2024): two stages on each of p ranks in the form of a V,
// I and W apart, all ranks with equally many activations. Any number of
// microbatches will do.

// V-Min: about a third of what 1F1B holds at most: the activations of 2 p / 3 + 2
// microbatches, rounded up, of a stage, of which a rank has two. With F = I = W a
// step takes at most (6 m + 4 p - 3) F. Where they differ much, every period waits.
Result<Plan> makeVMin(const ScheduleOptions& options);

// V-Half: about half of it, p + 3, and at most (6 m + 3.5 p) F.
Result<Plan> makeVHalf(const ScheduleOptions& options);

}  // namespace farandole::pipeline
