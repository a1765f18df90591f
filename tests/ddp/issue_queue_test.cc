#include "ddp/issue_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace farandole::ddp {
namespace {

TEST(IssueQueue, TakesGroupsInOrderWhateverOrderTheyAreReadyIn) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<int> groups;
    for (int group = 0; group < 8; ++group) {
      if (random() % 3 != 0) groups.push_back(group);
    }
    IssueQueue queue(groups);
    for (int round = 0; round < 3; ++round) {
      std::vector<int> ready = groups;
      std::shuffle(ready.begin(), ready.end(), random);
      std::vector<int> taken;
      for (int group : ready) {
        queue.markReady(group);
        while (const auto next = queue.takeNext()) taken.push_back(*next);
        EXPECT_FALSE(queue.takeNext());
      }
      EXPECT_EQ(taken, queue.order());
      EXPECT_EQ(queue.arrivals(), ready);
      EXPECT_TRUE(queue.setOrder(ready));
      queue.reset();
      EXPECT_EQ(queue.order(), ready) << "from the next round on";
    }
  }
}

TEST(IssueQueue, AnOrderOfOtherGroupsIsRefused) {
  IssueQueue queue({1, 3, 4});
  EXPECT_FALSE(queue.setOrder({1, 3}));
  EXPECT_FALSE(queue.setOrder({1, 3, 5}));
  EXPECT_FALSE(queue.setOrder({1, 3, 3}));
  EXPECT_EQ(queue.order(), (std::vector<int>{1, 3, 4}));
}

}  // namespace
}  // namespace farandole::ddp
