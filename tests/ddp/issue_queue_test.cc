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
      queue.orderBy(queue.places());
      queue.reset();
      EXPECT_EQ(queue.order(), ready) << "from the next round on";
    }
  }
}

TEST(IssueQueue, PlacesAreThoseOfGroupsByIndexAndWhatHasGotNothingIsBehindTheLast) {
  IssueQueue queue({1, 3, 4, 7});
  for (int round = 0; round < 2; ++round) {
    queue.markReady(4);
    queue.markReady(1);
    queue.endArrivals();
    queue.markReady(3);
    queue.markReady(7);
    EXPECT_EQ(queue.places(), (std::vector<int>{1, 4, 0, 4}));
    queue.reset();
  }
  queue.orderBy({1, 4, 0, 4});
  EXPECT_EQ(queue.order(), (std::vector<int>{4, 1, 3, 7}));
}

}  // namespace
}  // namespace farandole::ddp
