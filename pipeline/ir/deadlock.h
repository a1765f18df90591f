#pragma once

#include <string>

#include "pipeline/ir/action_index.h"
#include "pipeline/ir/plan.h"
#include "pipeline/ir/progress.h"

namespace farandole::pipeline {

// Why a run that got stuck cannot go on: the cycle of waits, one line each, and
// the steps around it as a grid of ranks by steps with the stuck ones in
// brackets. Both are cut at a size that fits a screen.
std::string describeDeadlock(const Plan& plan, const ActionIndex& index, const Progress& progress);

}  // namespace farandole::pipeline
