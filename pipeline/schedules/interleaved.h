#pragma once

#include "pipeline/schedules/schedule.h"

namespace farandole::pipeline {

// Interleaved 1F1B (Narayanan et al., "Megatron-LM", 2021): v stages on each of
// p ranks, stage i on rank i mod p. Rank r runs groups of g = microbatchGroup
// microbatches through its stages in turn, after a warm-up of
// 2 (p - r - 1) + (v - 1) g forwards. With m a multiple of g = p, a step takes
// (m v + p - 1) (F + B), F and B of one stage, and rank r holds the
// activations of min(m v, 2 (p - r - 1) + (v - 1) p + 1) microbatches of a
// stage. Any number of microbatches will do: the last group is what is left.
Result<Plan> makeInterleavedOneFOneB(const ScheduleOptions& options);

// Looped breadth-first (Lamy-Poirier, "Breadth-First Pipeline Parallelism",
// 2022): all microbatches through a rank's first stage, then all through its
// second one; backwards the same in reverse. Each stage's parameters are needed
// twice a step only. A rank holds the activations of all m microbatches of its
// v stages.
Result<Plan> makeLoopedBfs(const ScheduleOptions& options);

}  // namespace farandole::pipeline
