#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/ir/plan.h"
#include "pipeline/runtime/stage.h"

namespace farandole::pipeline {

// What passes over an edge for one microbatch: bytes of each tensor, with the output and with its gradient.
struct EdgeSizes {
  StageEdge edge;
  std::vector<std::int64_t> activation;
  std::vector<std::int64_t> gradient;
};

// Of the edges that begin in these stages; of each the microbatch whose size is the median. Empty before a step that
// has learned shapes.
std::vector<EdgeSizes> edgeSizes(std::vector<Stage>& stages);

}  // namespace farandole::pipeline
