#include "backend/net/group_tree.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <set>

namespace farandole::net {
namespace {

TEST(GroupTree, GivesEachRankAtMostSixteenChildrenWhileAllAreThere) {
  for (const int size : {1, 2, 16, 17, 18, 300, 5000}) {
    std::vector<int> children(static_cast<std::size_t>(size));
    for (int rank = 1; rank < size; ++rank) {
      const int parent = parentCandidates(rank, std::vector<bool>(static_cast<std::size_t>(size))).front();
      EXPECT_EQ(parent, (rank - 1) / kTreeArity);
      EXPECT_LE(++children[static_cast<std::size_t>(parent)], kTreeArity);
    }
    EXPECT_TRUE(parentCandidates(0, std::vector<bool>(static_cast<std::size_t>(size))).empty());
  }
}

TEST(GroupTree, ConnectsAllWhoAreLeftWhicheverCandidateEachTakes) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 300; ++round) {
    const int size = 1 + static_cast<int>(random() % 100);
    std::vector<bool> gone(static_cast<std::size_t>(size));
    for (int i = 0; i < size; ++i) gone[static_cast<std::size_t>(i)] = random() % 3 == 0;
    int roots = 0;
    for (int rank = 0; rank < size; ++rank) {
      if (gone[static_cast<std::size_t>(rank)]) continue;
      const std::vector<int> candidates = parentCandidates(rank, gone);
      if (candidates.empty()) ++roots;
      EXPECT_EQ(parentOf(rank, gone), candidates.empty() ? -1 : candidates.front());
      EXPECT_EQ(std::set<int>(candidates.begin(), candidates.end()).size(), candidates.size());
      for (const int candidate : candidates) {
        EXPECT_LT(candidate, rank);
        EXPECT_FALSE(gone[static_cast<std::size_t>(candidate)]);
      }
      const auto lower = std::accumulate(gone.begin(), gone.begin() + rank, 0, [](int n, bool g) { return n + !g; });
      EXPECT_EQ(static_cast<int>(candidates.size()), lower);
    }
    EXPECT_LE(roots, 1);
  }
}

}  // namespace
}  // namespace farandole::net
