#pragma once

#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// DualPipe (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024): two copies of a
// model of p stages on p ranks, in opposite directions. Stage i, on rank i, and
// stage p + i, on rank p - 1 - i, are the same one; the first half of the m
// microbatches runs through the stages below p, the second half through the
// others. In the steady state a forward of one copy goes together with a backward
// of the other (OVERLAP_F_B), whose messages the computation then hides. No rank
// waits longer than (p / 2 - 1) (F&B + B - 3 W), with F&B for such a pair and
// F = I = W; each holds the activations of p + 1 microbatches at most. p and m are
// even, and m >= 2 p: anything else is refused.
//
// options.numStages is 2 p; options.edges are those of one copy, between stages
// below p.
Result<Plan> makeDualPipe(const ScheduleOptions& options);

}  // namespace farandole::pipeline
