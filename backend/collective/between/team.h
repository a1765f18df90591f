#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "backend/collective/slice.h"

namespace farandole::collective {

class ExchangeDepth;

// Ranks that exchange messages among themselves: all of a group, or one of each host.
struct Team {
  std::vector<int> ranks;
  int index;                       // this rank's, in `ranks`
  std::vector<int> parts = {};     // of how many ranks of the group each one has the data, for what reduces
  ExchangeDepth* depth = nullptr;  // of two, from different hosts

  static Team all(int rank, int size) {
    Team team{std::vector<int>(size), rank, std::vector<int>(size, 1)};
    std::iota(team.ranks.begin(), team.ranks.end(), 0);
    return team;
  }
  int size() const { return static_cast<int>(ranks.size()); }
  // The rank `distance` places after this one, around the end.
  int after(int distance) const { return (index + distance) % size(); }
  // Of those `first` to `last` places before this one, together.
  int partsBefore(int first, int last) const {
    int sum = 0;
    for (int distance = first; distance <= last; ++distance) sum += parts[before(distance)];
    return sum;
  }
  int before(int distance) const { return (index - distance % size() + size()) % size(); }
};

// Data that passes in pieces, so that its messages, and the work on it, overlap.
class Chunks {
 public:
  static constexpr std::size_t kBytes = 256 << 10;
  // How many of them are under way at a time.
  static constexpr std::size_t kDepth = 8;

  // Of data up to `longest` bytes, at least one.
  Chunks(std::size_t longest, std::size_t elementSize)
      : bytes_(std::max(elementSize, std::min(kBytes / elementSize * elementSize, longest))),
        count_(numPieces(longest, bytes_)) {}

  std::size_t count() const { return count_; }
  std::size_t bytes() const { return bytes_; }
  std::size_t depth() const { return std::min(count_, kDepth); }
  Slice of(Slice data, std::size_t chunk) const { return pieceOf(data, chunk, bytes_); }

 private:
  std::size_t bytes_;
  std::size_t count_;
};

}  // namespace farandole::collective
