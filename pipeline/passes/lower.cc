#include "pipeline/passes/lower.h"

#include <utility>

#include "pipeline/ir/validate.h"
#include "pipeline/passes/fuse_batches.h"
#include "pipeline/passes/insert_communication.h"

namespace farandole::pipeline {

Result<Plan> lower(const Plan& plan, ChannelModel model) {
  Result<Plan> withMessages = insertCommunication(plan);
  if (!withMessages) return withMessages;
  Plan lowered = fuseBatches(std::move(*withMessages));
  const Status proven = validate(lowered, model);
  if (!proven) return proven.wrap("the lowered plan cannot run");
  return lowered;
}

}  // namespace farandole::pipeline
