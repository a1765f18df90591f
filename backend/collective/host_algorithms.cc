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

Contract contractOf(const Reduction& reduction, int root, std::size_t bytes) {
  return {root < 0 ? CollectiveKind::kAllReduce : CollectiveKind::kReduce, reduction.code,
          static_cast<std::uint32_t>(std::max(root, 0)), bytes};
}

// `begin`: in the input.
void copyFrom(Program& program, std::byte* to, const Gathered& input, std::size_t begin, std::size_t bytes) {
  input.forEach(begin, bytes, [&](std::size_t place, Slice part) { program.copy(to + place, part.data, part.bytes); });
}

// Two ranks: `output` = the input from `begin` on and what the other one has put into its slot.
void reduceWithOther(Program& program, HostSegment& host, HostTurn turn, const Reduction& reduction,
                     const Gathered& input, std::size_t begin, const Gathered& output, std::size_t bytes) {
  const int rank = host.index();
  std::byte* const theirs = host.slot(1 - rank, turn);
  forEachOfBoth(input, begin, output, 0, bytes, [&](std::size_t place, Slice mine, Slice result) {
    const void* parts[2];
    parts[rank] = mine.data;
    parts[1 - rank] = theirs + place;
    program.reduce(reduction.function, result.data, parts, result.bytes / reduction.elementSize);
  });
  program.claim(theirs, bytes);
}

void reduceFlat(Program& program, HostSegment& host, const Reduction& reduction, int root, const Gathered& input,
                const Gathered& output, std::size_t bytes) {
  const HostTurn turn = beginTurn(program, host, contractOf(reduction, root, bytes), 1);
  std::byte* const slot = host.slot(host.index(), turn);
  const bool isRead = host.size() > 2 || root != host.index();
  if (isRead) copyFrom(program, slot, input, 0, bytes);
  program.signal(turn.base + 1);
  if (root >= 0 && root != host.index()) return;
  program.meet(turn);
  if (host.size() == 2) return reduceWithOther(program, host, turn, reduction, input, 0, output, bytes);
  output.forEach(0, bytes, [&](std::size_t place, Slice result) {
    std::vector<const void*> parts(host.size());
    for (int rank = 0; rank < host.size(); ++rank) parts[rank] = host.slot(rank, turn) + place;
    program.reduce(reduction.function, result.data, parts, result.bytes / reduction.elementSize);
  });
}

// What the slot has room for, of two ranks.
void reduceScatterFlat(Program& program, HostSegment& host, const Reduction& reduction, const Contract& contract,
                       Slice output, const Gathered& input, std::span<const std::size_t> bytes) {
  const int rank = host.index();
  const HostTurn turn = beginTurn(program, host, contract, 1);
  copyFrom(program, host.slot(rank, turn), input, rank == 0 ? bytes[0] : 0, bytes[1 - rank]);
  program.signal(turn.base + 1);
  program.meet(turn);
  reduceWithOther(program, host, turn, reduction, input, rank == 0 ? 0 : bytes[0], Gathered({&output, 1}),
                  output.bytes);
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
  program.compareLast();
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
  std::byte* const slot = host.slot(root, turn);
  const bool isClaimed = host.size() == 2;
  if (host.index() == root) {
    isClaimed ? program.put(slot, data.data, data.bytes) : program.copy(slot, data.data, data.bytes);
  }
  program.signal(turn.base + 1);
  if (host.index() == root) return;
  program.meet(turn, root);
  if (isClaimed) {
    program.copyAndClaim(data.data, slot, data.bytes);
  } else {
    program.copy(data.data, slot, data.bytes);
  }
}

void reduceOnHost(Program& program, const Topology& topology, const Reduction& reduction, int root,
                  const Gathered& input, const Gathered& output) {
  HostSegment& host = *topology.wholeSegment();
  const int rank = host.index();
  const int size = host.size();
  const std::size_t bytes = output.bytes();
  const CollectiveKind kind = root < 0 ? CollectiveKind::kAllReduce : CollectiveKind::kReduce;
  if (bytes <= HostSegment::kSlotBytes && choose(topology, kind, bytes) == Algorithm::kSlots) {
    return reduceFlat(program, host, reduction, root, input, output, bytes);
  }
  const std::size_t pieceBytes = host.windowBytes() / reduction.elementSize * reduction.elementSize;
  const auto lengthOf = [&](std::size_t i) { return std::min(pieceBytes, bytes - std::min(i * pieceBytes, bytes)); };
  const auto shard = [&](int owner, std::size_t i) { return shardOf(owner, size, reduction.elementSize, lengthOf(i)); };
  // Of two ranks, where the other one has put its part, and from where it alone takes it out.
  const auto resultOf = [&](int owner, const Extent& part, std::size_t i) {
    return size == 2 ? host.window(1 - owner, i) + part.begin : host.result(owner, i);
  };
  const auto isStreamed = [&](Slice mine, Slice result) {
    return bytes >= kStreamedResultBytes && mine.data != result.data;
  };
  const auto takeOut = [&](std::size_t i) {  // all but the own shard
    if (root >= 0 && root != rank) return;
    for (int owner = 0; owner < size; ++owner) {
      if (owner == rank) continue;
      const Extent part = shard(owner, i);
      const std::byte* const from = resultOf(owner, part, i);
      const std::size_t begin = i * pieceBytes + part.begin;
      forEachOfBoth(input, begin, output, begin, part.bytes, [&](std::size_t place, Slice mine, Slice to) {
        isStreamed(mine, to) ? program.stream(to.data, from + place, to.bytes)
                             : program.copy(to.data, from + place, to.bytes);
      });
    }
  };
  const auto putIn = [&](std::size_t i) {  // all but the own shard
    const Extent own = shard(rank, i);
    const std::size_t end = own.begin + own.bytes;
    copyFrom(program, host.window(rank, i), input, i * pieceBytes, own.begin);
    copyFrom(program, host.window(rank, i) + end, input, i * pieceBytes + end, lengthOf(i) - end);
  };
  const auto reduce = [&](std::size_t i) {
    const Extent own = shard(rank, i);
    const std::size_t begin = i * pieceBytes + own.begin;
    std::vector<const void*> parts(size);
    forEachOfBoth(input, begin, output, begin, own.bytes, [&](std::size_t place, Slice mine, Slice result) {
      for (int from = 0; from < size; ++from) {
        parts[from] = from == rank ? mine.data : host.window(from, i) + own.begin + place;
      }
      const std::size_t count = result.bytes / reduction.elementSize;
      std::byte* const shared = resultOf(rank, own, i) + place;
      if (root == rank) {
        program.reduce(reduction.function, result.data, parts, count);
      } else if (root >= 0) {
        program.reduce(reduction.function, shared, parts, count);
      } else if (isStreamed(mine, result)) {
        program.reduce(reduction.function, shared, parts, count);
        program.stream(result.data, shared, result.bytes);
      } else {
        program.reduceAndCopy(reduction.function, result.data, shared, parts, count, reduction.elementSize);
      }
    });
  };
  pipeline(program, host, contractOf(reduction, root, bytes), numPieces(bytes, pieceBytes), takeOut, putIn, reduce);
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
  const std::size_t pieces = numPieces(longest, pieceBytes);
  const HostTurn turn = beginTurn(program, host, contract, Rounds::steps(pieces));
  // As if all turns were like this one: then each place changes hands each time.
  const auto passed = [&](int from, int to, std::size_t i) {
    return host.passed(from, to, turn.number * pieces + i, pieceBytes);
  };
  const auto putIn = [&](std::size_t i) {
    for (int owner = 0; owner < size; ++owner) {
      if (owner == rank) continue;
      copyFrom(program, passed(rank, owner, i), input, begins[owner] + i * pieceBytes, lengthOf(owner, i));
    }
  };
  const auto reduce = [&](std::size_t i) {
    std::vector<const void*> parts(size);
    input.forEach(begins[rank] + i * pieceBytes, lengthOf(rank, i), [&](std::size_t place, Slice mine) {
      for (int from = 0; from < size; ++from) {
        parts[from] = from == rank ? mine.data : passed(from, rank, i) + place;
      }
      program.reduce(reduction.function, output.data + i * pieceBytes + place, parts,
                     mine.bytes / reduction.elementSize);
    });
    for (int from = 0; from < size; ++from) {
      if (from != rank) program.claim(passed(from, rank, i), lengthOf(rank, i));
    }
  };
  passWindows(
      program, turn, pieces, /*windows=*/pieces, putIn, [](std::size_t) {}, reduce);
}

}  // namespace farandole::collective
