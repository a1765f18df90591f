#pragma once

#include "backend/common/status.h"
#include "pipeline/ir/action_index.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// Whether a plan carries its messages.
enum class Lowering {
  kCompute,   // compute actions only: no sends and receives may be there
  kMessages,  // every message between ranks must have its send and its receive
};

// That every rank lists what it must, once, and in an order that its own
// dependencies allow: forward before backward, I before W, receive before use,
// send after what makes it, waits and reductions after what they are about.
// Says nothing of how ranks wait for each other.
Status checkStructure(const Plan& plan, const ActionIndex& index, Lowering lowering);

}  // namespace farandole::pipeline
