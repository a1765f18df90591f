#pragma once

#include "backend/common/status.h"
#include "pipeline/ir/channel_model.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// From compute actions to what is executed: inserts the communication, fuses it
// into batches, and proves the result for the channel model of the transport
// that it will run on. The default is the strictest, whose plans run on all.
// Messages stand beside what they are for (insertCommunication()); for one queue
// for each rank, where that is not enough, in the order of the step (queueMessages()).
Result<Plan> lower(const Plan& plan, ChannelModel model = ChannelModel::kOneQueuePerRank);

}  // namespace farandole::pipeline
