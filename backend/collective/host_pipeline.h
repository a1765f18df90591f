#pragma once

#include <algorithm>

#include "backend/collective/host_algorithms.h"

namespace farandole::collective {

// Pieces that pass through the windows in a pipeline of three stages. In round i, a rank
// puts in piece i, reduces its shard of piece i - 1, and takes out the results of piece
// i - 2: nothing that it waits for was done by the others in the same round. It signals
// after putting in and after reducing; the values are these.
struct Rounds {
  HostTurn turn;

  static std::uint64_t steps(std::uint64_t pieces) { return 2 * pieces + 2; }
  std::uint64_t putIn(std::uint64_t piece) const { return turn.base + 2 * piece + 1; }
  std::uint64_t reduced(std::uint64_t piece) const { return turn.base + 2 * piece + 4; }
};

// Of a piece: in, reduced, out, and the signals and waits of each.
inline constexpr std::size_t kStepsOfPiece = 8;

// Before what another rank has put in is used: until all have.
inline void awaitPutIn(Program& program, const Rounds& rounds, std::uint64_t piece) {
  if (piece == 0) {
    program.meet(rounds.turn);
  } else {
    program.await(rounds.putIn(piece));
  }
}

template <typename TakeOut, typename PutIn, typename Reduce>
void pipeline(Program& program, HostSegment& host, const Contract& contract, std::size_t pieces, const TakeOut& takeOut,
              const PutIn& putIn, const Reduce& reduce) {
  // Two ranks take their results out of their own windows, where the other one may write next (HostSegment::passed): it
  // waits for one step more.
  const std::uint64_t steps = Rounds::steps(pieces) + (host.size() == 2 ? 1 : 0);
  const Rounds rounds{beginTurn(program, host, contract, steps)};
  program.reserve(pieces * kStepsOfPiece);
  for (std::uint64_t i = 0; i < pieces + 2; ++i) {
    if (i < pieces) {
      putIn(i);
      program.signal(rounds.putIn(i));
    }
    if (i >= 1 && i <= pieces) {
      awaitPutIn(program, rounds, i - 1);
      reduce(i - 1);
      program.signal(rounds.reduced(i - 1));
    }
    if (i >= 2) {
      program.await(rounds.reduced(i - 2));
      takeOut(i - 2);
    }
  }
  if (host.size() == 2) program.signal(rounds.turn.base + steps);
}

// The same where each rank is done with a piece when it has taken, or reduced, its part of it. A window is written
// again, after so many others, when everybody is done with what was in it; nobody waits for that of the last ones, but
// the next turn. `meanwhile`: work of this rank's own, while the others may not have come yet. The turn has
// Rounds::steps(pieces).
template <typename PutIn, typename Meanwhile, typename Take>
void passWindows(Program& program, HostTurn turn, std::size_t pieces, std::size_t windows, const PutIn& putIn,
                 const Meanwhile& meanwhile, const Take& take) {
  const Rounds rounds{turn};
  program.reserve(pieces * kStepsOfPiece);
  for (std::uint64_t i = 0; i <= pieces; ++i) {
    if (i < pieces) {
      if (i >= windows) program.await(rounds.reduced(i - windows));
      putIn(i);
      program.signal(rounds.putIn(i));
      meanwhile(i);
    }
    if (i == 0) continue;
    awaitPutIn(program, rounds, i - 1);
    take(i - 1);
    program.signal(rounds.reduced(i - 1));
  }
}

}  // namespace farandole::collective
