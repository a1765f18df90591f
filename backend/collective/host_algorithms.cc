#include "backend/collective/host_algorithms.h"

#include <algorithm>
#include <numeric>

#include "backend/collective/host_pipeline.h"
#include "backend/collective/selection.h"

namespace farandole::collective {
namespace {

// From here on results go past the caches where the input lies elsewhere: nobody has looked at that memory for long
// (measured with gradients in buckets of 4 and 8 MB; where it begins to pay is not known better).
constexpr std::size_t kStreamedResultBytes = 1 << 20;

// The part of a piece that a rank reduces, as offset and length in bytes.
struct Shard {
  std::size_t begin;
  std::size_t bytes;
};

Shard shardOf(int rank, int size, std::size_t elementSize, std::size_t bytes) {
  const std::size_t elements = bytes / elementSize;
  const std::size_t first = elements * rank / size;
  const std::size_t last = elements * (rank + 1) / size;
  return {first * elementSize, (last - first) * elementSize};
}

Contract contractOf(const Reduction& reduction, int root, Slice data) {
  return {root < 0 ? CollectiveKind::kAllReduce : CollectiveKind::kReduce, reduction.code,
          static_cast<std::uint32_t>(std::max(root, 0)), data.bytes};
}

// `begin`: in the input.
void copyFrom(Program& program, std::byte* to, const Gathered& input, std::size_t begin, std::size_t bytes) {
  input.forEach(begin, bytes, [&](std::size_t place, Slice part) { program.copy(to + place, part.data, part.bytes); });
}

// Two ranks: `output` = the input from `begin` on and what the other one has put into its slot.
void reduceWithOther(Program& program, HostSegment& host, HostTurn turn, const Reduction& reduction,
                     const Gathered& input, std::size_t begin, Slice output) {
  const int rank = host.index();
  std::byte* const theirs = host.slot(1 - rank, turn);
  input.forEach(begin, output.bytes, [&](std::size_t place, Slice mine) {
    const void* parts[2];
    parts[rank] = mine.data;
    parts[1 - rank] = theirs + place;
    program.reduce(reduction.function, output.data + place, parts, mine.bytes / reduction.elementSize);
  });
  program.claim(theirs, output.bytes);
}

void reduceFlat(Program& program, HostSegment& host, const Reduction& reduction, int root, const Gathered& input,
                Slice output) {
  const HostTurn turn = beginTurn(program, host, contractOf(reduction, root, output), 1);
  copyFrom(program, host.slot(host.index(), turn), input, 0, output.bytes);
  program.signal(turn.base + 1);
  if (root >= 0 && root != host.index()) return;
  program.meet(turn);
  if (host.size() == 2) return reduceWithOther(program, host, turn, reduction, input, 0, output);
  std::vector<const void*> parts(host.size());
  for (int rank = 0; rank < host.size(); ++rank) parts[rank] = host.slot(rank, turn);
  program.reduce(reduction.function, output.data, parts, output.bytes / reduction.elementSize);
}

// What the slot has room for, of two ranks.
void reduceScatterFlat(Program& program, HostSegment& host, const Reduction& reduction, const Contract& contract,
                       Slice output, const Gathered& input, std::span<const std::size_t> bytes) {
  const int rank = host.index();
  const HostTurn turn = beginTurn(program, host, contract, 1);
  copyFrom(program, host.slot(rank, turn), input, rank == 0 ? bytes[0] : 0, bytes[1 - rank]);
  program.signal(turn.base + 1);
  program.meet(turn);
  reduceWithOther(program, host, turn, reduction, input, rank == 0 ? 0 : bytes[0], output);
}

}  // namespace

std::size_t totalBytes(std::span<const Slice> slices) {
  std::size_t bytes = 0;
  for (const Slice& slice : slices) bytes += slice.bytes;
  return bytes;
}

std::size_t longestBytes(std::span<const Slice> slices) { return std::ranges::max(slices, {}, &Slice::bytes).bytes; }

HostTurn beginTurn(Program& program, HostSegment& host, const Contract& contract, std::uint64_t steps) {
  const HostTurn turn = program.takeTurn(host, steps);
  program.await(turn.base);
  program.setContract(turn, contract);
  return turn;
}

void announce(Program& program, const Topology& topology, const Contract& contract) {
  if (topology.segment == nullptr) return;
  const HostTurn turn = beginTurn(program, *topology.segment, contract, 1);
  program.signal(turn.base + 1);
  program.meet(turn);
}

void broadcastOnHost(Program& program, HostSegment& host, const Contract& contract, int root, Slice data) {
  const HostTurn turn = beginTurn(program, host, contract, 1);
  if (host.index() == root) program.copy(host.slot(root, turn), data.data, data.bytes);
  program.signal(turn.base + 1);
  if (host.index() == root) return;
  program.meet(turn, root);
  std::byte* const slot = host.slot(root, turn);
  if (host.size() == 2) {
    program.copyAndClaim(data.data, slot, data.bytes);
  } else {
    program.copy(data.data, slot, data.bytes);
  }
}

void reduceOnHost(Program& program, const Topology& topology, const Reduction& reduction, int root,
                  const Gathered& input, Slice output) {
  HostSegment& host = *topology.wholeSegment();
  const int rank = host.index();
  const int size = host.size();
  const CollectiveKind kind = root < 0 ? CollectiveKind::kAllReduce : CollectiveKind::kReduce;
  if (output.bytes <= HostSegment::kSlotBytes && choose(topology, kind, output.bytes) == Algorithm::kSlots) {
    return reduceFlat(program, host, reduction, root, input, output);
  }
  const std::size_t pieceBytes = host.windowBytes() / reduction.elementSize * reduction.elementSize;
  const auto shard = [&](int owner, std::size_t bytes) { return shardOf(owner, size, reduction.elementSize, bytes); };
  // Of two ranks, where the other one has put its part, and from where it alone takes it out.
  const auto result = [&](int owner, const Shard& part, std::size_t i) {
    return size == 2 ? host.window(1 - owner, i) + part.begin : host.result(owner, i);
  };
  const auto isStreamed = [&](std::size_t begin, Slice mine) {
    return output.bytes >= kStreamedResultBytes && mine.data != output.data + begin;
  };
  const auto takeOut = [&](std::size_t i) {  // all but the own shard
    if (root >= 0 && root != rank) return;
    const Slice piece = pieceOf(output, i, pieceBytes);
    for (int owner = 0; owner < size; ++owner) {
      if (owner == rank) continue;
      const Shard part = shard(owner, piece.bytes);
      const std::size_t begin = i * pieceBytes + part.begin;
      input.forEach(begin, part.bytes, [&](std::size_t place, Slice mine) {
        std::byte* const to = output.data + begin + place;
        const std::byte* const from = result(owner, part, i) + place;
        isStreamed(begin + place, mine) ? program.stream(to, from, mine.bytes) : program.copy(to, from, mine.bytes);
      });
    }
  };
  const auto putIn = [&](std::size_t i) {  // all but the own shard
    const Slice piece = pieceOf(output, i, pieceBytes);
    const Shard own = shard(rank, piece.bytes);
    const std::size_t end = own.begin + own.bytes;
    copyFrom(program, host.window(rank, i), input, i * pieceBytes, own.begin);
    copyFrom(program, host.window(rank, i) + end, input, i * pieceBytes + end, piece.bytes - end);
  };
  const auto reduce = [&](std::size_t i) {
    const Slice piece = pieceOf(output, i, pieceBytes);
    const Shard own = shard(rank, piece.bytes);
    std::vector<const void*> parts(size);
    input.forEach(i * pieceBytes + own.begin, own.bytes, [&](std::size_t place, Slice mine) {
      const std::size_t begin = own.begin + place;
      for (int from = 0; from < size; ++from) {
        parts[from] = from == rank ? mine.data : host.window(from, i) + begin;
      }
      const std::size_t count = mine.bytes / reduction.elementSize;
      std::byte* const shared = result(rank, own, i) + place;
      if (root == rank) {
        program.reduce(reduction.function, piece.data + begin, parts, count);
      } else if (root >= 0) {
        program.reduce(reduction.function, shared, parts, count);
      } else if (isStreamed(i * pieceBytes + begin, mine)) {
        program.reduce(reduction.function, shared, parts, count);
        program.stream(piece.data + begin, shared, mine.bytes);
      } else {
        program.reduceAndCopy(reduction.function, piece.data + begin, shared, parts, count, reduction.elementSize);
      }
    });
  };
  pipeline(program, host, contractOf(reduction, root, output), numPieces(output.bytes, pieceBytes), takeOut, putIn,
           reduce);
}

void reduceScatterOnHost(Program& program, const Topology& topology, const Reduction& reduction, Slice output,
                         const Gathered& input, std::span<const std::size_t> bytes) {
  HostSegment& host = *topology.wholeSegment();
  const int rank = host.index();
  const int size = host.size();
  const std::size_t longest = std::ranges::max(bytes);
  const std::size_t total = std::reduce(bytes.begin(), bytes.end());
  const Contract contract{CollectiveKind::kReduceScatter, reduction.code, 0, total, longest};
  if (longest <= HostSegment::kSlotBytes &&
      choose(topology, CollectiveKind::kReduceScatter, total) == Algorithm::kSlots) {
    return reduceScatterFlat(program, host, reduction, contract, output, input, bytes);
  }
  std::vector<std::size_t> begins(size, 0);
  std::partial_sum(bytes.begin(), bytes.end() - 1, begins.begin() + 1);
  const std::size_t share = host.windowBytes() / size;  // of a window, for each rank's piece
  const std::size_t pieceBytes = share / reduction.elementSize * reduction.elementSize;
  const auto lengthOf = [&](int owner, std::size_t i) {
    return std::min(pieceBytes, bytes[owner] - std::min(i * pieceBytes, bytes[owner]));
  };
  const auto putIn = [&](std::size_t i) {
    for (int owner = 0; owner < size; ++owner) {
      if (owner == rank) continue;
      std::byte* const place = host.window(rank, i) + owner * pieceBytes;
      copyFrom(program, place, input, begins[owner] + i * pieceBytes, lengthOf(owner, i));
    }
  };
  const auto reduce = [&](std::size_t i) {
    std::vector<const void*> parts(size);
    input.forEach(begins[rank] + i * pieceBytes, lengthOf(rank, i), [&](std::size_t place, Slice mine) {
      for (int from = 0; from < size; ++from) {
        parts[from] = from == rank ? mine.data : host.window(from, i) + rank * pieceBytes + place;
      }
      program.reduce(reduction.function, output.data + i * pieceBytes + place, parts,
                     mine.bytes / reduction.elementSize);
    });
    for (int from = 0; from < size; ++from) {
      if (from != rank) program.claim(host.window(from, i) + rank * pieceBytes, lengthOf(rank, i));
    }
  };
  const std::size_t pieces = numPieces(longest, pieceBytes);
  const HostTurn turn = beginTurn(program, host, contract, Rounds::steps(pieces));
  passWindows(
      program, turn, pieces, putIn, [](std::size_t) {}, reduce);
}

}  // namespace farandole::collective
