#include "backend/collective/host_swap.h"

#include <algorithm>

#include "backend/collective/host_pipeline.h"
#include "backend/collective/swap_ways.h"

namespace farandole::collective {
namespace {

// Of a part from here on nothing is in the caches anyhow when it is next looked at: what is taken and kept goes past
// them (8 MiB for each 1.6 ms -> 1.4, 32 MiB 7.7 -> 6.3; 2 MiB 0.2 -> 0.35), and what is put in is not held up by
// asking ahead for the lines of the window (8 MiB for each, on a Zen 5: 1.24 ms -> 1.15).
constexpr std::size_t kStreamedPartBytes = 8 << 20;

std::size_t longestOf(const Swap& swap) { return std::max(swap.output.bytes, swap.input.bytes); }

bool isStreamed(const Swap& swap) { return longestOf(swap) >= kStreamedPartBytes; }

// What is not streamed passes in longer pieces (on a Zen 5, all_gather of 1 MiB 30.4 us -> 28.3, of 4 MiB 105 -> 100;
// of 16 MiB, streamed, 1010 -> 1070).
std::size_t pieceBytesOf(const HostSegment& host, const Swap& swap) {
  return isStreamed(swap) ? host.windowBytes() : host.longWindowBytes();
}

bool hasRoom(const Swap& swap) { return longestOf(swap) <= HostSegment::kSlotBytes; }

// A swap in its turn. Each way ends with the turn's last step.
class SwapInTurn {
 public:
  // `ways`: where it is measured; else null.
  SwapInTurn(Program& program, HostSegment& host, HostTurn turn, std::uint64_t steps, const Swap& swap, SwapWays* ways)
      : program_(program), host_(host), turn_(turn), end_(turn.base + steps), swap_(swap), ways_(ways) {}

  // What two ranks have room for in their slots goes through those, all else through windows.
  void pass(bool claims) { hasRoom(swap_) ? throughSlots(claims) : throughWindows(claims); }

  void throughSlots(bool claims) {
    copy(host_.slot(rank(), turn_), swap_.input);
    program_.signal(end_);  // nobody waits for a slot to be read, but the turn after the next one
    keepAll();
    meet();
    take(swap_.output, host_.slot(1 - rank(), turn_), claims);
  }

  // Each one's window is for the other.
  void throughWindows(bool claims) {
    const std::size_t pieceBytes = pieceBytesOf(host_, swap_);
    const std::size_t pieces = numPieces(longestOf(swap_), pieceBytes);
    const bool streams = isStreamed(swap_);
    // As if all turns were like this one: then each window changes hands each time.
    const auto windowOf = [&](int from, std::size_t i) {
      const std::uint64_t piece = turn_.number * pieces + i;
      return streams ? host_.passed(from, 1 - from, piece, /*share=*/0) : host_.longPassed(from, piece);
    };
    const auto putIn = [&](std::size_t i) { copy(windowOf(rank(), i), pieceOf(swap_.input, i, pieceBytes)); };
    const auto keep = [&](std::size_t i) {
      const Slice to = pieceOf(swap_.kept, i, pieceBytes);
      const std::byte* const from = pieceOf(swap_.keptInput, i, pieceBytes).data;
      streams ? program_.stream(to.data, from, to.bytes) : program_.copy(to.data, from, to.bytes);
      if (i == std::min<std::size_t>(1, pieces - 1)) pause();  // who takes the first comes next
    };
    const auto takeOut = [&](std::size_t i) {
      if (i == 0) resume();
      const Slice piece = pieceOf(swap_.output, i, pieceBytes);
      std::byte* const window = windowOf(1 - rank(), i);
      if (!streams) return take(piece, window, claims);
      program_.stream(piece.data, window, piece.bytes);
      if (claims) program_.claim(window, piece.bytes);
    };
    passWindows(program_, turn_, pieces, /*windows=*/pieces, putIn, keep, takeOut);  // what it writes to it has taken
    const std::size_t rest = std::min(pieces * pieceBytes, swap_.kept.bytes);
    program_.copy(swap_.kept.data + rest, swap_.keptInput.data + rest, swap_.kept.bytes - rest);
  }

  void byReading() {
    program_.offer(turn_, 0, Offer::Way::kMemory, swap_.input.data, swap_.input.bytes, 0);
    program_.signal(turn_.base + 1);
    keepAll();
    meet();
    program_.take(turn_, 1 - rank(), 0, swap_.output.data, swap_.output.bytes, /*isOnlyReader=*/true);
    program_.signal(end_);
    program_.awaitRank(1 - rank(), end_);
  }

 private:
  int rank() const { return host_.index(); }
  void copy(std::byte* to, Slice data) { program_.copy(to, data.data, data.bytes); }
  void take(Slice to, std::byte* from, bool claims) {
    claims ? program_.copyAndClaim(to.data, from, to.bytes) : program_.copy(to.data, from, to.bytes);
  }
  // The own part is copied while the other one may not have come yet.
  void keepAll() { program_.copy(swap_.kept.data, swap_.keptInput.data, swap_.kept.bytes); }
  void meet() {
    pause();
    program_.meet(turn_);
    resume();
  }
  void pause() {
    if (ways_ != nullptr) program_.call([ways = ways_] { ways->pause(); });
  }
  void resume() {
    if (ways_ != nullptr) program_.call([ways = ways_] { ways->resume(); });
  }

  Program& program_;
  HostSegment& host_;
  const HostTurn turn_;
  const std::uint64_t end_;
  const Swap swap_;
  SwapWays* const ways_;
};

std::uint64_t stepsThroughWindows(const HostSegment& host, const Swap& swap) {
  return Rounds::steps(numPieces(longestOf(swap), pieceBytesOf(host, swap)));
}

// Which way is known when the turn comes.
void swapMeasured(Program& program, HostSegment& host, SwapWays& ways, const Contract& contract, const Swap& swap) {
  const std::uint64_t steps = hasRoom(swap) ? 2 : stepsThroughWindows(host, swap);
  const HostTurn turn = beginTurn(program, host, contract, steps);
  host.noteMeeting(turn);  // whichever way
  program.later([&host, &ways, turn, steps, swap](Program& rest) {
    const SwapWay way = ways.inTurn(turn, longestOf(swap));
    SwapInTurn one(rest, host, turn, steps, swap, ways.measures() ? &ways : nullptr);
    way == SwapWay::kReading ? one.byReading() : one.pass(way == SwapWay::kClaiming);
    if (ways.measures()) rest.call([&ways] { ways.end(); });
  });
}

}  // namespace

bool isSwap(HostSegment& host, Algorithm algorithm) {
  return host.size() == 2 && algorithm != Algorithm::kMessages &&
         (algorithm != Algorithm::kMemory || host.everybodyReads());
}

void swapOnHost(Program& program, const Topology& topology, Algorithm algorithm, Contract contract, const Swap& swap) {
  HostSegment& host = *topology.wholeSegment();
  contract.given = swap.input.bytes;
  contract.wanted = swap.output.bytes;
  const std::size_t longest = longestOf(swap);
  if (algorithm == Algorithm::kMeasured && longest >= kSmallestRead) {
    return swapMeasured(program, host, *topology.swapWays, contract, swap);
  }
  const auto begin = [&](std::uint64_t steps) {
    return SwapInTurn(program, host, beginTurn(program, host, contract, steps), steps, swap, nullptr);
  };
  if (algorithm == Algorithm::kMemory && longest >= kSmallestRead) return begin(2).byReading();
  if (algorithm != Algorithm::kWindows && hasRoom(swap)) return begin(1).throughSlots(/*claims=*/true);
  begin(stepsThroughWindows(host, swap)).throughWindows(/*claims=*/true);
}

}  // namespace farandole::collective
