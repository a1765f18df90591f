#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// Writes the actions of a rank with two stages ("chunks" 0 and 1), which each take their microbatches in order: every
// call is the next forward, or backward, of that chunk. A W that was left for later is the oldest I's.
class ChunkRank {
 public:
  struct Chunk {
    std::int32_t stage;
    MicrobatchRange microbatches;  // what is asked for beyond them is left out
  };
  ChunkRank(const std::array<Chunk, 2>& chunks, std::vector<Action>& actions) : chunks_(chunks), actions_(actions) {}

  void forward(int chunk);
  void backward(int chunk);
  void inputBackward(int chunk);
  void weightBackward(int chunk);
  // Of the oldest I of any chunk.
  void oldestWeightBackward();
  // One forward and one backward of different chunks, as one action.
  void overlap(int forwardChunk, int backwardChunk);

  std::int32_t numForwards(int chunk) const { return forwards_[chunk]; }
  // I whose W has not come.
  bool hasWeights(int chunk) const { return weights_[chunk] < backwards_[chunk]; }

 private:
  Action next(ActionKind kind, int chunk, std::array<std::int32_t, 2>& count) const;
  void add(int chunk, Action action);

  const std::array<Chunk, 2> chunks_;
  std::vector<Action>& actions_;
  std::array<std::int32_t, 2> forwards_{};
  std::array<std::int32_t, 2> backwards_{};
  std::array<std::int32_t, 2> weights_{};
  std::deque<int> left_;  // the chunks of the I whose W has not come, in order
};

}  // namespace farandole::pipeline
