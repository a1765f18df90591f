#pragma once

#include <cstdint>

#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// Posts every receive up to `depth` compute actions earlier than it stands, so
// that its transfer runs while the rank computes. For a plan with messages that
// are not batched yet. Receives keep their order, so a plan for kTagged or
// kFifoPerEdge stays valid; with one queue per rank it may not. Costs up to
// `depth` more receive buffers per stage and direction.
Plan prepostReceives(Plan plan, std::int32_t depth);

}  // namespace farandole::pipeline
