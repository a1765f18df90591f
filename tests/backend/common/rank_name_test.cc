#include "backend/common/rank_name.h"

#include <gtest/gtest.h>

namespace farandole {
namespace {

TEST(RankName, HasTheGlobalRankWhereItIsKnownAndAnotherOne) {
  EXPECT_EQ(rankName(1, -1), "rank 1");
  EXPECT_EQ(rankName(1, 1), "rank 1");
  EXPECT_EQ(rankName(1, 3), "rank 1 (global rank 3)");
  EXPECT_EQ(rankNumber(0, 12), "0 (global rank 12)");
  EXPECT_EQ(rankName(1, 1, "a", 7), "rank 1 (host a, pid 7)");
  EXPECT_EQ(rankName(1, 0, "a", 7), "rank 1 (global rank 0, host a, pid 7)");
}

}  // namespace
}  // namespace farandole
