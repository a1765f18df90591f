#pragma once

#include <vector>

#include "tests/backend/transport/nccl/simulator/kernel.h"

namespace farandole::testing {

// Moves and reduces the data of one collective: `calls` by rank, equal but for their buffers. Everything is read before
// anything is written, so that in place works.
void runCollective(const std::vector<const CollectiveCall*>& calls);

}  // namespace farandole::testing
