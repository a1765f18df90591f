#pragma once

#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// Zero bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023):
// the gradients of a stage's weights (W) are computed apart from those of its
// inputs (I), later, when the rank would else wait. p ranks, m microbatches, one
// stage on each; F, I and W are what these take.

// ZB-H1 holds as much as 1F1B does at most: every rank the activations of
// min(m, p) microbatches. With m >= p and F = I = W a step takes m (F + I + W) +
// (p - 1) (F + I - W).
Result<Plan> makeZbH1(const ScheduleOptions& options);

// ZB-H2 holds about twice as much, min(m, 2 p - 1). With m >= 2 p - 1 and
// F = I = W no rank waits between its first action and its last: what is left of
// the bubble is at the two ends of a step.
Result<Plan> makeZbH2(const ScheduleOptions& options);

// Zero bubble for v stages on each rank, which go round: interleaved 1F1B with a
// warm-up of (p - r - 1) + (v - 1) g, whose W follow their I by r turns of the
// rank (ZB1P in PyTorch; with one stage it is ZB-H1).
Result<Plan> makeInterleavedZeroBubble(const ScheduleOptions& options);

}  // namespace farandole::pipeline
