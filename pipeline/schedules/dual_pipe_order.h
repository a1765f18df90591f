#pragma once

#include "pipeline/schedules/chunk_rank.h"

namespace farandole::pipeline {

// The order of a rank's two chunks in DualPipe and DualPipeV, whose ranks are alike: `depth` ranks lie between either
// end of the pipeline and its middle, this one is the r-th of them from the end, and chunk 0 leads to the middle. Each
// chunk has `numMicrobatches`, at least 2 depth.
void addDualPipeOrder(ChunkRank& rank, std::int32_t depth, std::int32_t r, std::int32_t numMicrobatches);

}  // namespace farandole::pipeline
