#pragma once

#include "pipeline/schedules/building_block.h"

namespace farandole::pipeline {

// The block for every microbatch, with its beginning and its end filled: where a rank would wait, it takes what the
// block has for it later and what can run already, and W fills the rest. No rank holds more activations than one does
// when the block is only repeated. The published schedules are squeezed, too (Qi et al. 2024), by another method.
//
// A forward that is taken ahead has to leave some of the room for what the block has before it. How much is best
// differs, so that a few amounts are tried; the step is the shortest of theirs and of that in the block's order, where
// F, I and W take equally long.
Plan squeeze(const BuildingBlock& block, const ScheduleOptions& options);

}  // namespace farandole::pipeline
