#pragma once

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// Adds the messages of the graph of stages to a plan of compute actions,
// between different ranks only. A send follows what makes it. A receive comes
// right before what consumes it, or earlier where that keeps the receives of an
// edge in the order of its sends.
//
// Where two ranks exchange (each sends what the other receives next, as in the
// steady state of 1F1B), both list the message of the lower rank first: with
// one queue per rank two sends would otherwise wait for each other.
Result<Plan> insertCommunication(const Plan& plan);

}  // namespace farandole::pipeline
