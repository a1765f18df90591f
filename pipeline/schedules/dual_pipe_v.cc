#include "pipeline/schedules/dual_pipe_v.h"

#include <string>

#include "pipeline/schedules/chunk_rank.h"
#include "pipeline/schedules/placement.h"

namespace farandole::pipeline {
namespace {

void fill(ChunkRank& rank, std::int32_t p, std::int32_t r, std::int32_t numMicrobatches) {
  const std::int32_t below = p - r - 1;
  for (std::int32_t i = 0; i < 2 * below; ++i) rank.forward(0);
  for (std::int32_t i = 0; i <= r; ++i) {
    rank.forward(0);
    rank.forward(1);
  }
  for (std::int32_t i = 0; i < below; ++i) {
    rank.inputBackward(1);
    rank.oldestWeightBackward();
    rank.forward(1);
  }
  for (std::int32_t i = 0; i < numMicrobatches - 2 * p + r + 1; ++i) {
    if (i == 0 && below == 0) {
      // Both are of one microbatch's way: one after the other.
      rank.forward(0);
      rank.backward(1);
    } else {
      rank.overlap(0, 1);
    }
    rank.overlap(1, 0);
  }
  for (std::int32_t i = 0; i < below; ++i) {
    rank.backward(1);
    rank.overlap(1, 0);
  }
  // From the middle on the weights are left for later, when the gradients are on their way.
  bool isSplit = false;
  const auto backward = [&](int chunk) {
    if (isSplit) {
      rank.inputBackward(chunk);
    } else {
      rank.backward(chunk);
    }
  };
  for (std::int32_t i = 0; i <= r; ++i) {
    const bool isMiddle = i == (r + 1) / 2;
    isSplit = isSplit || (isMiddle && r % 2 == 1);
    backward(1);
    isSplit = isSplit || isMiddle;
    backward(0);
  }
  for (std::int32_t i = 0; i < below; ++i) {
    rank.oldestWeightBackward();
    rank.inputBackward(0);
  }
  while (rank.hasWeights(0) || rank.hasWeights(1)) rank.oldestWeightBackward();
}

}  // namespace

Result<Plan> makeDualPipeV(const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkTwoStagesPerRank("DualPipeV", options));
  if (options.numMicrobatches < 2 * options.numRanks) {
    return refuse("DualPipeV", "numMicrobatches", options.numMicrobatches,
                  "at least 2 numRanks = " + std::to_string(2 * options.numRanks));
  }
  Plan plan = makeVPlan(options);
  for (std::int32_t r = 0; r < options.numRanks; ++r) {
    ChunkRank rank({r, options.numStages - 1 - r}, options.numMicrobatches, plan.ranks[r]);
    fill(rank, options.numRanks, r, options.numMicrobatches);
  }
  return options.forwardOnly ? forwardsOf(std::move(plan)) : plan;
}

}  // namespace farandole::pipeline
