#pragma once

#include <string>

#include "pipeline/ir/simulate.h"

namespace farandole::pipeline {

// A text picture of a simulated or measured step: a row per rank, `columns`
// characters wide (at least 1), each compute action as wide as it lasts and
// labelled as far as that goes, idle time as dots; then the rank's busy share
// and peak of live activations.
std::string drawTimeline(const SimulationResult& result, int columns);

}  // namespace farandole::pipeline
