#pragma once

#include <bit>
#include <span>

#include "backend/collective/between/team.h"
#include "backend/collective/reduction.h"

namespace farandole::collective::between {

// Makes a team a power of two: of the first 2 * extra ranks each even one gives its
// part to the odd one after it, sits out, and is given the result.
struct Folding {
  int power;  // ranks that take part
  int extra;

  explicit Folding(int size)
      : power(static_cast<int>(std::bit_floor(static_cast<unsigned>(size)))), extra(size - power) {}
  bool sitsOut(int index) const { return index < 2 * extra && index % 2 == 0; }
  // The number of a rank among those that take part, and back.
  int numberOf(int index) const { return index < 2 * extra ? index / 2 : index - extra; }
  // Of how many ranks those have the data for whose numbers `isAmong` holds, once pairs have been folded.
  template <typename IsAmong>
  int parts(const Team& team, const IsAmong& isAmong) const {
    int sum = 0;
    for (int index = 0; index < team.size(); ++index) {
      if (isAmong(numberOf(index))) sum += team.parts[index];
    }
    return sum;
  }
  int indexOf(int number) const { return number < extra ? 2 * number + 1 : number + extra; }
};

// Runs takePart(folding, number) between the two steps, where this rank takes part.
// `scratch` holds as much as the data.
template <typename TakePart>
void withFolding(Program& program, const Team& team, const Combiner& sum, Slice data, std::byte* scratch,
                 const TakePart& takePart) {
  const Folding folding(team.size());
  if (folding.sitsOut(team.index)) {
    const int partner = team.ranks[team.index + 1];
    program.send(partner, data.data, data.bytes);
    program.wait();
    program.recv(partner, data.data, data.bytes);
    return;
  }
  const bool hasPartner = team.index < 2 * folding.extra;
  if (hasPartner) {
    program.recv(team.ranks[team.index - 1], scratch, data.bytes);
    program.wait();
    const void* const parts[] = {scratch, data.data};
    sum.combine(program, data.data, parts, std::span(team.parts).subspan(team.index - 1, 2), data.bytes);
  }
  takePart(folding, folding.numberOf(team.index));
  if (hasPartner) program.send(team.ranks[team.index - 1], data.data, data.bytes);
}

}  // namespace farandole::collective::between
