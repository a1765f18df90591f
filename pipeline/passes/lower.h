#pragma once

#include <cstdint>

#include "backend/common/status.h"
#include "pipeline/ir/channel_model.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// How many compute actions earlier than it is needed a receive is posted. With two, messages that take no longer than
// the shortest action arrive as if all receives were open from the beginning, and longer ones lose little; a rank then
// holds buffers for the messages of two actions more.
inline constexpr std::int32_t kPrepostDepth = 2;

// From compute actions to what is executed: inserts the communication, posts
// receives ahead, fuses what is exchanged into batches, and proves the result for the channel model of
// the transport that it will run on. The default is the strictest, whose plans run on all.
//
// With one queue for each rank a receive that is posted early holds up what comes after it: there messages
// stand beside what they are for (insertCommunication()), or, where that is not
// enough, in the order of the step (queueMessages()).
Result<Plan> lower(const Plan& plan, ChannelModel model = ChannelModel::kOneQueuePerRank);

}  // namespace farandole::pipeline
