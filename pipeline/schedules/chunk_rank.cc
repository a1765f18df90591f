#include "pipeline/schedules/chunk_rank.h"

#include <algorithm>
#include <utility>

#include "pipeline/ir/action_kind.h"

namespace farandole::pipeline {

Action ChunkRank::next(ActionKind kind, int chunk, std::array<std::int32_t, 2>& count) const {
  const Chunk& own = chunks_[chunk];
  return {own.stage, kind, own.microbatches.begin + count[chunk]++, {}};
}

void ChunkRank::add(int chunk, Action action) {
  if (action.microbatch < chunks_[chunk].microbatches.end) actions_.push_back(std::move(action));
}

void ChunkRank::forward(int chunk) { add(chunk, next(ActionKind::kForward, chunk, forwards_)); }

void ChunkRank::backward(int chunk) {
  add(chunk, next(ActionKind::kBackward, chunk, backwards_));
  ++weights_[chunk];
}

void ChunkRank::inputBackward(int chunk) {
  add(chunk, next(ActionKind::kBackwardInput, chunk, backwards_));
  left_.push_back(chunk);
}

void ChunkRank::weightBackward(int chunk) {
  add(chunk, next(ActionKind::kBackwardWeight, chunk, weights_));
  left_.erase(std::ranges::find(left_, chunk));
}

void ChunkRank::oldestWeightBackward() { weightBackward(left_.front()); }

void ChunkRank::overlap(int forwardChunk, int backwardChunk) {
  const Action forward = next(ActionKind::kForward, forwardChunk, forwards_);
  const Action backward = next(ActionKind::kBackward, backwardChunk, backwards_);
  ++weights_[backwardChunk];
  actions_.push_back(makeComposite(ActionKind::kOverlapFB, {forward, backward}));
}

}  // namespace farandole::pipeline
