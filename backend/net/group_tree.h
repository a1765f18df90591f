#pragma once

#include <vector>

namespace farandole::net {

inline constexpr int kTreeArity = 16;

// Whom `rank` may attach itself to, best first: its ancestors in the k-ary tree
// over all ranks from the nearest up, then every other lower rank from the
// lowest up; without those that are gone. Empty for the lowest rank that is not
// gone: the root. When every other rank is attached to one of these, all are
// connected, whoever is gone and whichever they chose: each step up lowers the
// rank. Pure.
std::vector<int> parentCandidates(int rank, const std::vector<bool>& gone);

// The first of them, or -1 for the root.
int parentOf(int rank, const std::vector<bool>& gone);

}  // namespace farandole::net
