#pragma once

#include <utility>
#include <vector>

#include "backend/c10d/process_group.h"

namespace farandole::backend {

// Calls launch(peer, items) for each peer of a batch, in the order in which both sides come to it.
template <typename Launch>
void forEachPeer(int rank, int size, std::vector<BatchEntry> entries, const Launch& launch) {
  std::vector<p2p::BatchOp> ops;
  ops.reserve(entries.size());
  for (const BatchEntry& entry : entries) {
    ops.push_back({entry.direction, entry.peer, static_cast<std::uint32_t>(entry.tag)});
  }
  for (const p2p::PeerBatch& batch : p2p::planBatch(rank, size, ops)) {
    std::vector<MessagesOperation::Item> items;
    for (const std::uint32_t index : batch.ops) {
      BatchEntry& entry = entries[index];
      const bool isSend = entry.direction == p2p::Direction::kSend;
      items.push_back({std::move(entry.tensor), batch.peer, static_cast<std::uint32_t>(entry.tag), isSend, entry.key});
    }
    launch(batch.peer, std::move(items));
  }
}

}  // namespace farandole::backend
