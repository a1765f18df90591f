#include "backend/collective/hierarchy/on_host.h"

#include <algorithm>

#include "backend/collective/host_pipeline.h"

namespace farandole::collective::hierarchy {
namespace {

std::size_t longest(std::span<const Stream> streams) {
  std::size_t bytes = 0;
  for (const Stream& stream : streams) bytes = std::max(bytes, stream.bytes());
  return bytes;
}

}  // namespace

void reduceToOwners(Program& program, HostSegment& host, const Contract& contract, const Combiner& sum,
                    std::span<const int> owners, std::byte* output, std::span<const Stream> inputs) {
  const int index = host.index();
  const auto own = std::find(owners.begin(), owners.end(), index) - owners.begin();
  const bool isOwner = static_cast<std::size_t>(own) < owners.size();
  // Each owner has a share of every window.
  const std::size_t share = host.windowBytes() / owners.size();
  const std::size_t pieceBytes = share / sum.elementSize() * sum.elementSize();
  const auto putIn = [&](std::size_t i) {
    for (std::size_t o = 0; o < owners.size(); ++o) {
      if (owners[o] == index) continue;
      inputs[o].forEach(i * pieceBytes, pieceBytes, [&](Slice slice, std::size_t offset) {
        program.put(host.window(index, i) + o * pieceBytes + offset, slice.data, slice.bytes);
      });
    }
  };
  const std::vector<int> ranks(host.size(), 1);
  const auto reduce = [&](std::size_t i) {
    if (!isOwner) return;
    inputs[own].forEach(i * pieceBytes, pieceBytes, [&](Slice slice, std::size_t offset) {
      std::vector<const void*> parts(host.size());
      for (int from = 0; from < host.size(); ++from) {
        parts[from] = from == index ? slice.data : host.window(from, i) + own * pieceBytes + offset;
      }
      sum.combine(program, output + i * pieceBytes + offset, parts, ranks, slice.bytes);
      for (int from = 0; from < host.size(); ++from) {
        if (from != index) program.claim(host.window(from, i) + own * pieceBytes + offset, slice.bytes);
      }
    });
  };
  const std::size_t pieces = numPieces(longest(inputs), pieceBytes);
  const HostTurn turn = beginTurn(program, host, contract, Rounds::steps(pieces));
  passWindows(
      program, turn, pieces, HostSegment::kWindows, putIn, [](std::size_t) {}, reduce);
}

// In round i a rank takes out piece i - 1, puts in piece i and signals both: a window is
// written again when all have taken out what was in it.
void shareBlocks(Program& program, HostSegment& host, const Contract* contract, std::span<const Stream> blocks) {
  const std::size_t pieceBytes = host.windowBytes();
  const int index = host.index();
  const std::size_t pieces = numPieces(longest(blocks), pieceBytes);
  HostTurn turn;
  if (contract != nullptr) {
    turn = beginTurn(program, host, *contract, pieces + 1);
  } else {
    turn = program.takeTurn(host, pieces + 1);
    program.await(turn.base);
  }
  for (std::size_t i = 0; i <= pieces; ++i) {
    if (i == 1 && contract != nullptr) {
      program.meet(turn);
    } else if (i >= 1) {
      program.await(turn.base + i);
    }
    for (std::size_t owner = 0; i >= 1 && owner < blocks.size(); ++owner) {
      if (static_cast<int>(owner) == index) continue;
      blocks[owner].forEach((i - 1) * pieceBytes, pieceBytes, [&](Slice slice, std::size_t offset) {
        program.copy(slice.data, host.window(static_cast<int>(owner), i - 1) + offset, slice.bytes);
      });
    }
    if (i < pieces && static_cast<std::size_t>(index) < blocks.size()) {
      blocks[index].forEach(i * pieceBytes, pieceBytes, [&](Slice slice, std::size_t offset) {
        program.copy(host.window(index, i) + offset, slice.data, slice.bytes);
      });
    }
    program.signal(turn.base + i + 1);
  }
}

}  // namespace farandole::collective::hierarchy
