#pragma once

#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// One forward, one backward in turn after a warm-up of k (p - s - 1) forwards,
// p stages, stage s, k = warmupPerStage (PipeDream-flush; Narayanan et al.,
// "Megatron-LM", 2021: k = 1; PiPPy: k = 2). A rank holds the activations of
// min(m, k (p - s - 1) + 1) microbatches. Any number of microbatches m will do,
// fewer than stages too. A larger k takes no less time, but leaves messages
// more of it.
Result<Plan> makeOneFOneB(const ScheduleOptions& options);

}  // namespace farandole::pipeline
