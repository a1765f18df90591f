#pragma once

#include <cstdint>

#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// Posts every receive up to `depth` compute actions earlier than it stands, so
// that its transfer runs while the rank computes. For a plan with messages that
// are not batched yet. Receives from one rank keep their order, so a plan for
// kTagged or kFifoPerEdge stays valid; with one queue per rank it may not.
//
// Held open at a time are the messages of at most `depth` compute actions more
// than before. A gradient is not received before its activation is sent, for it
// cannot come earlier; nor is anything before a rank's first compute action that
// itself waits for no message: that one runs while ranks still agree on the step.
//
// A malformed plan comes back as it is; validate() says why.
Plan prepostReceives(Plan plan, std::int32_t depth);

}  // namespace farandole::pipeline
