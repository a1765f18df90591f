#pragma once

#include <cstdint>
#include <string>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"
#include "pipeline/ir/stage_graph.h"

namespace farandole::pipeline {

// "rank 1, step 5 (1B0)": how errors name a place in a plan. Steps count from 0.
std::string describeStep(const Plan& plan, std::int32_t rank, std::int32_t step);

// The counts, the placement of the stages and what they run; of the edges see StageGraph::make().
Status checkFrame(const Plan& plan);

// One action by itself, in a plan whose frame is right: its stage, rank and
// microbatch, whom it talks to, its parts.
Status checkAction(const Plan& plan, const StageGraph& graph, std::int32_t rank, std::int32_t step);

}  // namespace farandole::pipeline
