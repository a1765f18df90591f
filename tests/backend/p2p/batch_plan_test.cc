#include "backend/p2p/batch_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

namespace farandole::p2p {
namespace {

// One message of a random exchange and the identity by which matching is checked.
struct Transfer {
  int source;
  int target;
  std::uint32_t tag;
  int id;
};

struct RankList {
  std::vector<BatchOp> ops;
  std::vector<int> ids;  // of the transfer behind each
};

// Every rank lists its halves of the transfers in an order of its own; those
// with equal (source, target, tag) keep their order, as c10d demands.
std::vector<RankList> randomLists(std::mt19937_64& random, int size) {
  std::vector<Transfer> transfers(random() % 60);
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    transfers[i] = {static_cast<int>(random() % size), static_cast<int>(random() % size),
                    static_cast<std::uint32_t>(random() % 4), static_cast<int>(i)};
  }
  std::vector<RankList> lists(size);
  for (int rank = 0; rank < size; ++rank) {
    struct Half {
      BatchOp op;
      int id;
    };
    std::vector<Half> halves;
    for (const Transfer& t : transfers) {
      if (t.source == rank) halves.push_back({{Direction::kSend, t.target, t.tag}, t.id});
      if (t.target == rank) halves.push_back({{Direction::kRecv, t.source, t.tag}, t.id});
    }
    std::shuffle(halves.begin(), halves.end(), random);
    // Restore the order among equals: the i-th occurrence of a key gets the i-th smallest id.
    std::map<std::tuple<Direction, int, std::uint32_t>, std::vector<int>> byKey;
    for (const Half& h : halves) byKey[{h.op.direction, h.op.peer, h.op.tag}].push_back(h.id);
    for (auto& [key, ids] : byKey) std::sort(ids.rbegin(), ids.rend());
    for (Half& h : halves) {
      auto& ids = byKey[{h.op.direction, h.op.peer, h.op.tag}];
      h.id = ids.back();
      ids.pop_back();
      lists[rank].ops.push_back(h.op);
      lists[rank].ids.push_back(h.id);
    }
  }
  return lists;
}

struct Step {
  BatchOp op;
  int id;
};

std::vector<Step> flatten(int rank, int size, const RankList& list, bool planned) {
  std::vector<Step> steps;
  if (!planned) {
    for (std::size_t i = 0; i < list.ops.size(); ++i) steps.push_back({list.ops[i], list.ids[i]});
    return steps;
  }
  for (const PeerBatch& batch : planBatch(rank, size, list.ops)) {
    for (const std::uint32_t index : batch.ops) {
      EXPECT_EQ(list.ops[index].peer, batch.peer);
      steps.push_back({list.ops[index], list.ids[index]});
    }
  }
  return steps;
}

// The strictest transport: one operation after the other, each waiting until the
// peer stands at its counterpart. Returns how many operations never finish;
// every match is checked. A message to oneself is one send and one receive in a row.
int runRendezvous(std::vector<std::vector<Step>> ranks) {
  std::vector<std::size_t> at(ranks.size(), 0);
  const auto head = [&](int rank) -> const Step* {
    return at[rank] < ranks[rank].size() ? &ranks[rank][at[rank]] : nullptr;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
      const Step* mine = head(rank);
      if (mine == nullptr) continue;
      const int peer = mine->op.peer;
      if (peer == rank) {  // buffered: order is all that matters
        ++at[rank];
        moved = true;
        continue;
      }
      const Step* theirs = head(peer);
      if (theirs == nullptr || theirs->op.peer != rank || theirs->op.direction == mine->op.direction) continue;
      EXPECT_EQ(mine->op.tag, theirs->op.tag);
      EXPECT_EQ(mine->id, theirs->id);
      ++at[rank];
      ++at[peer];
      moved = true;
    }
  }
  int stuck = 0;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) stuck += static_cast<int>(ranks[rank].size() - at[rank]);
  return stuck;
}

TEST(BatchPlan, RandomListsInAnyOrderMatchAndNeverDeadlockUnderRendezvous) {
  int naiveDeadlocks = 0;
  for (std::uint64_t seed = 1; seed <= 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const int size = 1 + static_cast<int>(random() % 16);
    const std::vector<RankList> lists = randomLists(random, size);
    std::vector<std::vector<Step>> planned;
    std::vector<std::vector<Step>> naive;
    for (int rank = 0; rank < size; ++rank) {
      planned.push_back(flatten(rank, size, lists[rank], true));
      naive.push_back(flatten(rank, size, lists[rank], false));
      ASSERT_EQ(planned.back().size(), naive.back().size());
    }
    ASSERT_EQ(runRendezvous(planned), 0);
    // The same lists issued as they are: matching by position, so only deadlock counts here.
    std::vector<std::vector<Step>> anonymous = naive;
    for (auto& steps : anonymous) {
      for (Step& step : steps) step.id = 0, step.op.tag = 0;
    }
    naiveDeadlocks += runRendezvous(anonymous) > 0;
  }
  // The property has teeth: without the plan most of these exchanges hang.
  EXPECT_GT(naiveDeadlocks, 1500);
}

TEST(BatchPlan, EveryOperationAppearsOnceAndPeersAreVisitedOnce) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const int size = 1 + static_cast<int>(random() % 16);
    const RankList list = randomLists(random, size)[0];
    std::set<int> peers;
    std::set<std::uint32_t> seen;
    for (const PeerBatch& batch : planBatch(0, size, list.ops)) {
      EXPECT_TRUE(peers.insert(batch.peer).second);
      for (const std::uint32_t index : batch.ops) EXPECT_TRUE(seen.insert(index).second);
    }
    EXPECT_EQ(seen.size(), list.ops.size());
  }
}

TEST(BatchPlan, RoundsPairRanksSoThatNobodyIsEverybodysFirst) {
  const int size = 8;
  std::map<int, int> firstPeer;
  for (int rank = 0; rank < size; ++rank) {
    std::vector<BatchOp> all;
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) all.push_back({Direction::kSend, peer, 0});
    }
    firstPeer[rank] = planBatch(rank, size, all)[0].peer;
  }
  // In round 0 ranks i and 8 - i meet; 0 and 4 would meet themselves and go on to round 1 and 1.
  EXPECT_EQ(firstPeer, (std::map<int, int>{{0, 1}, {1, 7}, {2, 6}, {3, 5}, {4, 5}, {5, 3}, {6, 2}, {7, 1}}));
}

TEST(BatchPlan, EmptyBatchHasNoPeers) { EXPECT_TRUE(planBatch(0, 4, {}).empty()); }

}  // namespace
}  // namespace farandole::p2p
