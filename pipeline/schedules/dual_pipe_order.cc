#include "pipeline/schedules/dual_pipe_order.h"

namespace farandole::pipeline {

void addDualPipeOrder(ChunkRank& rank, std::int32_t depth, std::int32_t r, std::int32_t numMicrobatches) {
  const std::int32_t below = depth - r - 1;
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
  for (std::int32_t i = 0; i < numMicrobatches - 2 * depth + r + 1; ++i) {
    if (i == 0 && below == 0) {
      // At the middle the B would wait for the F, of this rank or of the one across: one after the other.
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

}  // namespace farandole::pipeline
