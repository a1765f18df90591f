#pragma once

#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// One forward, one backward in turn after a warm-up of p - s - 1 forwards, p
// stages, stage s (PipeDream-flush; Narayanan et al., "Megatron-LM", 2021). A
// rank holds the activations of min(m, p - s) microbatches. Any number of
// microbatches m will do, fewer than stages too.
Result<Plan> makeOneFOneB(const ScheduleOptions& options);

}  // namespace farandole::pipeline
