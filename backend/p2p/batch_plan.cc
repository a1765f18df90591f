#include "backend/p2p/batch_plan.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace farandole::p2p {

std::vector<PeerBatch> planBatch(int rank, int size, std::span<const BatchOp> ops) {
  const auto key = [&](std::uint32_t index) {
    const BatchOp& op = ops[index];
    const Direction first = rank <= op.peer ? Direction::kSend : Direction::kRecv;
    return std::tuple((rank + op.peer) % size, op.direction != first, op.tag, index);
  };
  std::vector<std::uint32_t> order(ops.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return key(a) < key(b); });

  std::vector<PeerBatch> batches;
  for (const std::uint32_t index : order) {
    if (batches.empty() || batches.back().peer != ops[index].peer) batches.push_back({ops[index].peer, {}});
    batches.back().ops.push_back(index);
  }
  return batches;
}

}  // namespace farandole::p2p
