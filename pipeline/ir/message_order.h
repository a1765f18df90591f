#pragma once

#include "backend/common/status.h"
#include "pipeline/ir/action_index.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// That on every directed edge between two ranks the receives are posted in the
// order of their sends. A transport without tags matches them by that order,
// so anything else would swap their contents.
Status checkMessageOrder(const Plan& plan, const ActionIndex& index);

}  // namespace farandole::pipeline
