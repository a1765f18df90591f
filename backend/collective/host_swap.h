#pragma once

#include "backend/collective/algorithm_table.h"
#include "backend/collective/host_algorithms.h"

namespace farandole::collective {

// What one of two ranks of a host gives and gets, of which both know the lengths: they compare them when they meet.
struct Swap {
  Slice output;
  Slice input;
  Slice kept;  // of `keptInput`
  Slice keptInput;
};

// Whether two ranks go this way by swapOnHost(): all that needs no messages.
bool isSwap(HostSegment& host, Algorithm algorithm);

void swapOnHost(Program& program, const Topology& topology, Algorithm algorithm, Contract contract, const Swap& swap);

}  // namespace farandole::collective
