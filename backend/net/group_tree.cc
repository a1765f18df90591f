#include "backend/net/group_tree.h"

#include <algorithm>
#include <cstddef>

namespace farandole::net {

std::vector<int> parentCandidates(int rank, const std::vector<bool>& gone) {
  std::vector<int> candidates;
  std::vector<bool> seen(gone);
  const auto add = [&](int candidate) {
    if (seen[static_cast<std::size_t>(candidate)]) return;
    seen[static_cast<std::size_t>(candidate)] = true;
    candidates.push_back(candidate);
  };
  for (int at = rank; at > 0;) add(at = (at - 1) / kTreeArity);
  for (int lower = 0; lower < rank; ++lower) add(lower);
  return candidates;
}

int parentOf(int rank, const std::vector<bool>& gone) {
  for (int at = rank; at > 0;) {
    at = (at - 1) / kTreeArity;
    if (!gone[static_cast<std::size_t>(at)]) return at;
  }
  const int lowest = static_cast<int>(std::find(gone.begin(), gone.end(), false) - gone.begin());
  return lowest < rank ? lowest : -1;
}

}  // namespace farandole::net
