#pragma once

#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// DualPipeV (DeepSeek, "DualPipe", 2025, one of its two halves): two stages on
// each of p ranks in the form of a V, and in the steady state a forward of one
// of them together with a backward of the other (OVERLAP_F_B), whose messages
// the computation then hides. Needs m >= 2 p microbatches. A rank holds the
// activations of at most 2 p + 1 microbatches of a stage.
Result<Plan> makeDualPipeV(const ScheduleOptions& options);

}  // namespace farandole::pipeline
