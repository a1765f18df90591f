#pragma once

#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// All forwards, then all backwards (Huang et al., "GPipe", 2019). A rank holds
// the activations of all m microbatches.
Result<Plan> makeGPipe(const ScheduleOptions& options);

}  // namespace farandole::pipeline
