// Collectives that move data, on one host. In two steps: each rank tells what it has for whom, and
// the others take it, from its slot or out of its own memory; then they say that they have it. Nobody but the
// rank that gives needs to know beforehand how much it is. Two ranks know how much they give each other, and may pass
// it through their slots, or through their windows when there is no room.
#include <algorithm>
#include <optional>

#include "backend/collective/host_algorithms.h"
#include "backend/collective/host_pipeline.h"
#include "backend/collective/selection.h"

namespace farandole::collective {
namespace {

// Pieces in a slot begin with a cache line.
constexpr std::size_t kLine = 64;

// Of what everybody gives to all or to each: two ranks that read put there what is not worth it, others all that has
// room, which is faster than reading it (four on two cores, 16 KiB from each to all: 70 to 100 us against 124 to 146).
std::size_t mostInSlot(const HostSegment& host, Algorithm algorithm) {
  return algorithm == Algorithm::kMemory && host.size() == 2 ? kSmallestRead - 1 : HostSegment::kSlotBytes;
}

// What this rank hands out in a turn.
class Offers {
 public:
  Offers(Program& program, HostSegment& host, HostTurn turn, std::size_t mostInSlot = HostSegment::kSlotBytes)
      : program_(program), turn_(turn), canBeRead_(host.everybodyReads()), mostInSlot_(mostInSlot) {}

  // Before the first signal. What the others cannot read is sent.
  void add(int entry, Slice data, Algorithm algorithm) {
    const std::size_t room = HostSegment::kSlotBytes - used_;
    const bool isRead = algorithm == Algorithm::kMemory && canBeRead_;
    Offer::Way way = isRead ? Offer::Way::kMemory : Offer::Way::kMessage;
    if (data.bytes <= std::min(room, isRead ? mostInSlot_ : room)) way = Offer::Way::kSlot;
    program_.offer(turn_, entry, way, data.data, data.bytes, used_);
    if (way == Offer::Way::kSlot) used_ += std::min((data.bytes + kLine - 1) / kLine * kLine, room);
    stays_ = stays_ || way != Offer::Way::kSlot;
    given_.push_back({entry, data, way});
  }

  // After the first signal: what cannot be taken is sent. One entry may be for several ranks.
  void sendTo(int index, int entry) {
    const auto given = std::ranges::find(given_, entry, &Given::entry);
    if (given->way == Offer::Way::kMessage) program_.send(index, given->data.data, given->data.bytes);
  }

  // At the end: until the others have read what stayed in this rank's memory, or have begun to receive it; who
  // gives up is not waited for.
  void awaitTaken(int index = Program::kAllRanks) {
    if (stays_) program_.awaitRank(index, turn_.base + 2);
  }

 private:
  struct Given {
    int entry;
    Slice data;
    Offer::Way way;
  };

  Program& program_;
  const HostTurn turn_;
  const bool canBeRead_;
  const std::size_t mostInSlot_;  // of what can be read
  bool stays_ = false;
  std::size_t used_ = 0;  // of the slot
  std::vector<Given> given_;
};

void takeFrom(Program& program, HostTurn turn, int index, int entry, Slice output, bool isOnlyReader = true) {
  program.meet(turn, index);
  program.take(turn, index, entry, output.data, output.bytes, isOnlyReader);
}

// Runs run(index) for all ranks but the own one, from the next one on: not all begin with the same.
template <typename Run>
void forOthers(const HostSegment& host, const Run& run) {
  for (int i = 1; i < host.size(); ++i) run((host.index() + i) % host.size());
}

// What one of two ranks gives and gets.
struct Swap {
  Slice output;
  Slice input;
  Slice kept;  // of `keptInput`
  Slice keptInput;
};

// Of a part from here on nothing is in the caches anyhow when it is next looked at: what is taken and kept goes past
// them (8 MiB for each 1.6 ms -> 1.4, 32 MiB 7.7 -> 6.3; 2 MiB 0.2 -> 0.35).
constexpr std::size_t kStreamedPartBytes = 8 << 20;

void swapThroughSlots(Program& program, HostSegment& host, const Contract& contract, const Swap& swap) {
  const int rank = host.index();
  const HostTurn turn = beginTurn(program, host, contract, 1);
  program.copy(host.slot(rank, turn), swap.input.data, swap.input.bytes);
  program.signal(turn.base + 1);
  program.copy(swap.kept.data, swap.keptInput.data, swap.kept.bytes);
  program.meet(turn);
  program.copyAndClaim(swap.output.data, host.slot(1 - rank, turn), swap.output.bytes);
}

// Each one's window is for the other. Faster than reading it where it is at every size on some machines (256 KiB kept
// and taken 18 us against 28, 2 MiB 210 against 270, 32 MiB 7.3 ms against 9.3), and up to 1.6 times slower on others.
void swapThroughWindows(Program& program, HostSegment& host, const Contract& contract, const Swap& swap) {
  const int rank = host.index();
  const std::size_t longest = std::max(swap.output.bytes, swap.input.bytes);
  const std::size_t pieceBytes = host.windowBytes();
  const auto partOf = [=](Slice data, std::size_t i) { return pieceOf(data, i, pieceBytes); };
  const auto keep = [&](Slice to, const std::byte* from) {
    if (longest < kStreamedPartBytes) {
      program.copy(to.data, from, to.bytes);
    } else {
      program.stream(to.data, from, to.bytes);
    }
  };
  const auto putIn = [&](std::size_t i) {
    const Slice piece = partOf(swap.input, i);
    program.copy(host.window(rank, i), piece.data, piece.bytes);
  };
  const auto keepOwn = [&](std::size_t i) { keep(partOf(swap.kept, i), partOf(swap.keptInput, i).data); };
  const auto take = [&](std::size_t i) {
    const Slice piece = partOf(swap.output, i);
    std::byte* const window = host.window(1 - rank, i);
    if (longest < kStreamedPartBytes) return program.copyAndClaim(piece.data, window, piece.bytes);
    program.stream(piece.data, window, piece.bytes);
    program.claim(window, piece.bytes);
  };
  const std::size_t pieces = numPieces(longest, pieceBytes);
  passWindows(program, host, contract, pieces, putIn, keepOwn, take);
  const std::size_t rest = std::min(pieces * pieceBytes, swap.kept.bytes);
  program.copy(swap.kept.data + rest, swap.keptInput.data + rest, swap.kept.bytes - rest);
}

// Of two ranks, which compare them when they meet.
void tellLengths(Contract& contract, const Swap& swap) {
  contract.given = swap.input.bytes;
  contract.wanted = swap.output.bytes;
}

// Whether two ranks pass it to each other by this algorithm; else each takes what the other one offers.
bool isSwap(Algorithm algorithm) { return algorithm == Algorithm::kSlots || algorithm == Algorithm::kWindows; }

// Both know both lengths, and compare them when they meet; so both go the same way.
void swapOfTwo(Program& program, HostSegment& host, Algorithm algorithm, const Contract& contract, const Swap& swap) {
  const bool haveRoom = std::max(contract.given, contract.wanted) <= HostSegment::kSlotBytes;
  if (algorithm == Algorithm::kSlots && haveRoom) {
    swapThroughSlots(program, host, contract, swap);
  } else {
    swapThroughWindows(program, host, contract, swap);
  }
}

}  // namespace

// The own part is copied while the others may not have come yet.
void allGatherOnHost(Program& program, const Topology& topology, Slice input, std::span<const Slice> outputs) {
  HostSegment& host = *topology.wholeSegment();
  const std::size_t longest = longestBytes(outputs);
  const std::size_t total = totalBytes(outputs);
  const Algorithm algorithm = choose(topology, CollectiveKind::kAllGather, total);
  // Known to all: nothing is read from anybody's memory, and nobody needs to hear that it has been.
  const std::size_t mostInSlots = mostInSlot(host, algorithm);
  const bool isShort = longest <= mostInSlots;
  const int rank = host.index();
  Contract contract{CollectiveKind::kAllGather, 0, 0, total, longest};
  if (host.size() == 2) {
    const Swap swap{outputs[1 - rank], input, outputs[rank], input};
    tellLengths(contract, swap);
    if (isSwap(algorithm)) return swapOfTwo(program, host, algorithm, contract, swap);
  }
  const HostTurn turn = beginTurn(program, host, contract, isShort ? 1 : 2);
  Offers offers(program, host, turn, mostInSlots);
  offers.add(0, input, algorithm);
  program.signal(turn.base + 1);
  program.copy(outputs[rank].data, input.data, input.bytes);
  forOthers(host, [&](int index) { offers.sendTo(index, 0); });
  forOthers(host, [&](int index) { takeFrom(program, turn, index, 0, outputs[index], /*isOnlyReader=*/false); });
  if (isShort) return;
  program.signal(turn.base + 2);
  offers.awaitTaken();
}

void allToAllOnHost(Program& program, const Topology& topology, std::span<const Slice> outputs,
                    std::span<const Slice> inputs) {
  HostSegment& host = *topology.wholeSegment();
  const int rank = host.index();
  Contract contract{CollectiveKind::kAllToAll, 0, 0, 0};
  const auto algorithmFor = [&](std::size_t bytes) { return choose(topology, CollectiveKind::kAllToAll, bytes); };
  std::optional<Algorithm> ofTwo;  // who know the longer one of what they give each other
  if (host.size() == 2) {
    const Swap swap{outputs[1 - rank], inputs[1 - rank], outputs[rank], inputs[rank]};
    tellLengths(contract, swap);
    ofTwo = algorithmFor(std::max(swap.output.bytes, swap.input.bytes));
    if (isSwap(*ofTwo)) return swapOfTwo(program, host, *ofTwo, contract, swap);
  }
  const HostTurn turn = beginTurn(program, host, contract, 2);
  Offers offers(program, host, turn, ofTwo ? mostInSlot(host, *ofTwo) : HostSegment::kSlotBytes);
  forOthers(host,
            [&](int index) { offers.add(index, inputs[index], ofTwo ? *ofTwo : algorithmFor(inputs[index].bytes)); });
  program.signal(turn.base + 1);
  program.copy(outputs[rank].data, inputs[rank].data, inputs[rank].bytes);
  forOthers(host, [&](int index) { offers.sendTo(index, index); });
  forOthers(host, [&](int index) { takeFrom(program, turn, index, rank, outputs[index]); });
  program.signal(turn.base + 2);
  offers.awaitTaken();
}

// Here and below, who takes nothing says at once that it has all; the root meets everybody, the others meet the root.
void gatherOnHost(Program& program, const Topology& topology, int root, Slice input, std::span<const Slice> outputs) {
  HostSegment& host = *topology.wholeSegment();
  const Contract contract{CollectiveKind::kGather, 0, static_cast<std::uint32_t>(root), 0};
  const HostTurn turn = beginTurn(program, host, contract, 2);
  if (host.index() == root) {
    program.signal(turn.base + 1);
    program.copy(outputs[root].data, input.data, input.bytes);
    forOthers(host, [&](int index) { takeFrom(program, turn, index, 0, outputs[index]); });
    return program.signal(turn.base + 2);
  }
  Offers offers(program, host, turn);
  offers.add(0, input, choose(topology, CollectiveKind::kGather, input.bytes));
  program.signal(turn.base + 2);
  offers.sendTo(root, 0);
  program.meet(turn, root);
  offers.awaitTaken(root);
}

void scatterOnHost(Program& program, const Topology& topology, int root, Slice output, std::span<const Slice> inputs) {
  HostSegment& host = *topology.wholeSegment();
  const Contract contract{CollectiveKind::kScatter, 0, static_cast<std::uint32_t>(root), 0};
  const HostTurn turn = beginTurn(program, host, contract, 2);
  if (host.index() != root) {
    program.signal(turn.base + 1);
    takeFrom(program, turn, root, host.index(), output);
    return program.signal(turn.base + 2);
  }
  Offers offers(program, host, turn);
  forOthers(host, [&](int index) {
    offers.add(index, inputs[index], choose(topology, CollectiveKind::kScatter, inputs[index].bytes));
  });
  program.signal(turn.base + 2);
  forOthers(host, [&](int index) { offers.sendTo(index, index); });
  program.copy(output.data, inputs[root].data, inputs[root].bytes);
  program.meet(turn);
  offers.awaitTaken();
}

}  // namespace farandole::collective
