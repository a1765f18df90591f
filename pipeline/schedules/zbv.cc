#include "pipeline/schedules/zbv.h"

#include <algorithm>

#include "pipeline/schedules/chunk_rank.h"
#include "pipeline/schedules/placement.h"

namespace farandole::pipeline {
namespace {

void fill(ChunkRank& rank, std::int32_t p, std::int32_t r, std::int32_t numMicrobatches) {
  // The warm-up: down the V, until the first microbatch comes up again, and through the loss.
  for (std::int32_t i = 0; i < 2 * (p - r) - 1; ++i) rank.forward(0);
  for (std::int32_t i = 0; i < r; ++i) {
    rank.forward(1);
    rank.forward(0);
  }
  const auto upAndBack = [&] {
    rank.forward(1);
    rank.inputBackward(1);
    rank.weightBackward(1);
  };
  for (std::int32_t i = 0; i < p - r; ++i) upAndBack();
  // All six in turn.
  while (rank.numForwards(1) < numMicrobatches) {
    if (rank.numForwards(0) < numMicrobatches) rank.forward(0);
    rank.inputBackward(0);
    rank.weightBackward(0);
    upAndBack();
  }
  // The gradients on their way; the weights fill what is left.
  for (std::int32_t i = 0; i < r; ++i) {
    rank.inputBackward(0);
    rank.inputBackward(1);
  }
  for (std::int32_t i = 0; i < p - r; ++i) {
    rank.inputBackward(0);
    rank.weightBackward(0);
  }
  for (const int chunk : {1, 0}) {
    while (rank.hasWeights(chunk)) rank.weightBackward(chunk);
  }
}

}  // namespace

Result<Plan> makeZbv(const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkTwoStagesPerRank("ZBV", options));
  Plan plan = makeVPlan(options);
  // The form needs that many; those that are not there are left out.
  const std::int32_t numMicrobatches = std::max(options.numMicrobatches, 2 * options.numRanks - 1);
  for (std::int32_t r = 0; r < options.numRanks; ++r) {
    const MicrobatchRange all{0, options.numMicrobatches};
    ChunkRank rank({{{r, all}, {options.numStages - 1 - r, all}}}, plan.ranks[r]);
    fill(rank, options.numRanks, r, numMicrobatches);
  }
  return options.forwardOnly ? forwardsOf(std::move(plan)) : plan;
}

}  // namespace farandole::pipeline
