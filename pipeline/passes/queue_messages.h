#pragma once

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// Adds the messages of the graph of stages to a plan of compute actions, for ranks with one queue each.
//
// The plan is run in thought, one action after another in the order in which they end where an F, I or W takes as long
// as another one and a B twice as long. When one has ended what it makes is sent at once: the message is put at that
// place of both ranks' actions, before what the receiver has yet to run. Then both ends of any message stand behind
// the same messages, all of which were sent before, and in front of nothing that it needs: this run is one without
// waiting, and what can run can only run so far (Progress). So every plan that can run has such an order; the price is
// receives that are posted before the action that runs meanwhile, and messages that stand behind others of other ranks.
//
// What two ranks exchange at the same time is one BATCH_P2P. An error when the plan cannot run.
Result<Plan> queueMessages(const Plan& plan);

}  // namespace farandole::pipeline
