#pragma once

#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/memory_use.h"
#include "pipeline/ir/simulate.h"

namespace farandole::pipeline {

// From `time` on, in seconds, the rank holds `bytes`, until the next point.
struct MemoryPoint {
  double time = 0;
  double bytes = 0;
};

// What a rank holds over a step: first nothing, then a point for every action that takes memory and for every one that
// frees some. Of points at one time the last one stays; those before it are peaks of no duration.
struct MemoryCurve {
  std::vector<MemoryPoint> points;
  double peak = 0;  // bytes
};

// One for each rank of a simulated or measured step. An action takes memory when it begins and frees it when it is
// done; peaks are those of peakMemory(). kInvalidArgument: `stages` lacks a stage of the step.
Result<std::vector<MemoryCurve>> memoryOverTime(const SimulationResult& step, const std::vector<StageMemory>& stages);

}  // namespace farandole::pipeline
