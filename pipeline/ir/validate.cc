#include "pipeline/ir/validate.h"

#include <string>

#include "pipeline/ir/action_index.h"
#include "pipeline/ir/deadlock.h"
#include "pipeline/ir/message_order.h"
#include "pipeline/ir/progress.h"
#include "pipeline/ir/structure.h"

namespace farandole::pipeline {

Status validate(const Plan& plan, ChannelModel model) {
  const Result<ActionIndex> index = ActionIndex::build(plan);
  if (!index) return index.status();
  FARANDOLE_RETURN_IF_ERROR(checkStructure(plan, *index, Lowering::kMessages));
  if (model != ChannelModel::kTagged) FARANDOLE_RETURN_IF_ERROR(checkMessageOrder(plan, *index));
  Progress progress(plan, *index, model);
  if (progress.run()) return Status::ok();
  return Status::invalidArgument("deadlock under " + std::string(toString(model)) + ":" +
                                 describeDeadlock(plan, *index, progress));
}

}  // namespace farandole::pipeline
