#pragma once

#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// No pipelining: each microbatch goes through all stages and back before the
// next one begins (Megatron-LM's forward_backward_no_pipelining, for one rank).
// A rank holds the activations of one microbatch, for each of its stages.
Result<Plan> makeNone(const ScheduleOptions& options);

}  // namespace farandole::pipeline
