#include "pipeline/passes/lower.h"

#include <utility>

#include "pipeline/ir/validate.h"
#include "pipeline/passes/fuse_batches.h"
#include "pipeline/passes/insert_communication.h"
#include "pipeline/passes/prepost_receives.h"
#include "pipeline/passes/queue_messages.h"

namespace farandole::pipeline {

Result<Plan> lower(const Plan& plan, ChannelModel model) {
  Result<Plan> withMessages = insertCommunication(plan);
  if (!withMessages) return withMessages;
  const bool isQueued = model == ChannelModel::kOneQueuePerRank;
  Plan lowered =
      fuseBatches(isQueued ? std::move(*withMessages) : prepostReceives(std::move(*withMessages), kPrepostDepth));
  const Status proven = validate(lowered, model);
  if (proven) return lowered;
  if (isQueued) {
    Result<Plan> queued = queueMessages(plan);
    if (queued && validate(*queued, model)) return queued;
  }
  return proven.wrap("the lowered plan cannot run");
}

}  // namespace farandole::pipeline
