#pragma once

#include "backend/common/status.h"
#include "pipeline/ir/channel_model.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// Proves that a lowered plan runs to its end on a transport of the given kind,
// in time linear in the number of actions. A plan without any backward is taken
// as forward-only. Waits are those of the executor: posts return at once, a
// compute action waits for the receives that it consumes (for the whole batch
// that one is part of), WAIT_SEND for sends, the end of the step for all.
//
// A plan that is refused comes with its reason: the action and where it stands,
// or for a deadlock the cycle of waits on a grid of ranks by steps. What
// kOneQueuePerRank accepts, the other two accept too.
Status validate(const Plan& plan, ChannelModel model);

}  // namespace farandole::pipeline
