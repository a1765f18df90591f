#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace farandole::p2p {

enum class Direction : std::uint8_t { kSend, kRecv };

// One operation of a batch, as its caller lists it.
struct BatchOp {
  Direction direction;
  int peer;
  std::uint32_t tag;
};

// The operations with one peer: indices into the caller's list, in the order in
// which both sides come to them.
struct PeerBatch {
  int peer;
  std::vector<std::uint32_t> ops;
};

// The order in which `rank` carries out a batch, whatever order it was listed in.
//
// Peers come in the rounds of a round-robin tournament: in round r ranks i and j
// with (i + j) mod size = r meet, so that both sides of an edge come to it in the
// same round and no rank is everybody's first. With one peer, operations are
// sorted by (direction, tag, position in the list), where the lower rank sends
// first and the higher receives first. So two ranks that list the same operations
// in different orders match, and executing one operation after the other, each
// waiting for its counterpart, cannot deadlock.
std::vector<PeerBatch> planBatch(int rank, int size, std::span<const BatchOp> ops);

}  // namespace farandole::p2p
