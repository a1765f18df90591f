#pragma once

#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/simulate.h"

namespace farandole::pipeline {

// A measured step in the form of a simulated one: what each rank did, in its order, in seconds on one clock that is 0
// at the step's beginning. The step ends with its last action. kInvalidArgument: an action that ends before it starts,
// or a time that is negative or not finite.
Result<SimulationResult> measuredStep(std::vector<std::vector<TimedAction>> ranks);

}  // namespace farandole::pipeline
