#pragma once

#include <vector>

#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// Bytes that one microbatch of a stage holds, on its rank.
struct StageMemory {
  double activations = 0;  // from its F to its B, or to its I
  double forWeights = 0;   // from its I to its W: what the weights' gradients need
};

// What an action takes when it begins and gives back when it is done, in bytes. `stages`: one for each stage of the
// plan.
double memoryTaken(const Action& action, const std::vector<StageMemory>& stages);
double memoryFreed(const Action& action, const std::vector<StageMemory>& stages);

// The most bytes that each rank holds at a time, if it runs its actions in their order. A forward-only plan holds
// nothing. `stages`: one for each stage of the plan.
std::vector<double> peakMemory(const Plan& plan, const std::vector<StageMemory>& stages);

}  // namespace farandole::pipeline
