#include "backend/transport/nccl/point_to_point.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>

#include "tests/backend/transport/nccl/device_groups.h"
#include "tests/random_seed.h"

namespace farandole::transport {
namespace {

using farandole::testing::someSeed;
using testing::DeviceGroups;
using testing::joined;
using testing::OperationPtr;
using namespace std::chrono_literals;

// One message of a random plan; the receiver must find its count in the data.
struct Planned {
  int from;
  int to;
  std::uint32_t tag;
  // Another for each message: of a batch that both ends have posted alike once it is taken that they do so again, and
  // the other end's batches are others here.
  std::uint32_t element;
  std::size_t count;
  std::vector<int> sent;
  std::vector<int> received;
};

// Of each rank: its messages, in batches. Along an edge the order is the same on both sides, else it is random.
std::vector<std::vector<std::vector<Planned*>>> randomBatches(std::deque<Planned>& plan, int size,
                                                              std::mt19937_64& rng) {
  std::vector<std::vector<std::vector<Planned*>>> batches(size);
  for (int rank = 0; rank < size; ++rank) {
    // Merges the edges of this rank in random turns.
    std::map<std::pair<int, int>, std::deque<Planned*>> edges;
    for (Planned& message : plan) {
      if (message.from == rank || message.to == rank) edges[{message.from, message.to}].push_back(&message);
    }
    batches[rank].emplace_back();
    while (!edges.empty()) {
      auto edge = std::next(edges.begin(), static_cast<long>(rng() % edges.size()));
      batches[rank].back().push_back(edge->second.front());
      edge->second.pop_front();
      if (edge->second.empty()) edges.erase(edge);
      if (rng() % 3 == 0) batches[rank].emplace_back();
    }
  }
  return batches;
}

TEST(PointToPoint, RandomBatchesArriveInWhateverOrderTheRanksComeToTheirEdges) {
  const std::uint64_t first = someSeed();
  for (std::uint64_t seed = first; seed < first + 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed);
    const int size = 2 + static_cast<int>(rng() % 4);
    DeviceGroups ranks(size, seed);
    ranks.cluster.setConnectsBlock(rng() % 2 == 0);
    std::deque<Planned> plan;
    for (int i = 0; i < 30; ++i) {
      const int from = static_cast<int>(rng() % size);
      const int to = (from + 1 + static_cast<int>(rng() % (size - 1))) % size;
      const std::size_t count = rng() % 3 == 0 ? 0 : 1 + rng() % 500;
      const auto tag = static_cast<std::uint32_t>(rng() % 3);
      plan.push_back({from, to, tag, static_cast<std::uint32_t>(i), count, std::vector<int>(count, -2),
                      std::vector<int>(count, -1)});
    }
    const auto batches = randomBatches(plan, size, rng);
    const std::uint64_t waits = rng();
    ranks.each([&](int rank) {
      std::mt19937_64 own(waits + rank);
      std::vector<OperationPtr> pending;
      for (const auto& batch : batches[rank]) {
        std::vector<DeviceGroups::Message> messages;
        for (Planned* message : batch) {
          const bool isSend = message->from == rank;
          // Written by a kernel in front of the send: it must be waited for.
          if (isSend) {
            ranks.cluster.enqueue(ranks.streams[rank], [message] {
              std::fill(message->sent.begin(), message->sent.end(), static_cast<int>(message->count));
            });
          }
          messages.push_back({isSend, isSend ? message->to : message->from,
                              isSend ? message->sent.data() : message->received.data(), message->count * sizeof(int),
                              message->tag, message->element});
        }
        for (const auto& operation : ranks.post(rank, messages)) pending.push_back(operation);
      }
      std::shuffle(pending.begin(), pending.end(), own);
      for (const auto& operation : pending) ranks.wait(rank, operation);
      EXPECT_TRUE(ranks.cluster.synchronize(ranks.streams[rank], 20s));
      for (const auto& operation : pending) {
        EXPECT_TRUE(operation->awaitEnd());
        ASSERT_TRUE(operation->status()) << operation->status().toString() << joined(ranks.cluster.violations());
        EXPECT_FALSE(operation->hasBuffers());
      }
    });
    for (const Planned& message : plan) {
      EXPECT_EQ(message.received, std::vector<int>(message.count, static_cast<int>(message.count)));
    }
    ranks.close();
    EXPECT_EQ(joined(ranks.cluster.violations()), "");
    EXPECT_EQ(ranks.cluster.live().communicators, 0);
    if (HasFailure()) return;
  }
}

TEST(PointToPoint, EdgesThatAreAskedForAreConnectedBeforeTheirFirstMessage) {
  const std::uint64_t seed = someSeed();
  std::mt19937_64 rng(seed);
  DeviceGroups ranks(3, seed);
  const auto numConnected = [&] { return ranks.cluster.live().communicators; };
  std::vector<std::uint64_t> seeds{rng(), rng(), rng()};
  ranks.each([&](int rank) {
    std::mt19937_64 own(seeds[rank]);
    std::vector<EdgeKey> edges{{rank, true}, {rank, false}};
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == rank) continue;
      edges.push_back({peer, true});
      edges.push_back({peer, false});
    }
    std::ranges::shuffle(edges, own);
    const auto on = ranks.groups[rank]->on(rank);
    ASSERT_TRUE(on);
    EXPECT_TRUE((*on)->connectEdges(edges));
    EXPECT_TRUE((*on)->connectEdges(edges)) << "again";
  });
  for (const auto deadline = DeviceClock::now() + 20s; numConnected() < 12 && DeviceClock::now() < deadline;) {
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(numConnected(), 12) << "two ends of six edges";
  ranks.close();
  EXPECT_EQ(joined(ranks.cluster.violations()), "");
}

TEST(PointToPoint, BothEndsOfAnEdgeMakeTheSameCallsInTheSameOrder) {
  const std::uint64_t seed = someSeed();
  std::mt19937_64 rng(seed);
  DeviceGroups ranks(3, seed);
  std::deque<Planned> plan;
  for (int i = 0; i < 60; ++i) {
    const int from = static_cast<int>(rng() % 3);
    const std::size_t count = 1 + rng() % 900;
    plan.push_back({from, (from + 1 + static_cast<int>(rng() % 2)) % 3, 0, static_cast<std::uint32_t>(i), count,
                    std::vector<int>(count), std::vector<int>(count)});
  }
  const auto batches = randomBatches(plan, 3, rng);
  ranks.each([&](int rank) {
    std::vector<OperationPtr> pending;
    for (const auto& batch : batches[rank]) {
      std::vector<DeviceGroups::Message> messages;
      for (Planned* message : batch) {
        const bool isSend = message->from == rank;
        messages.push_back({isSend, isSend ? message->to : message->from,
                            isSend ? message->sent.data() : message->received.data(), message->count * sizeof(int),
                            message->tag, message->element});
      }
      for (const auto& operation : ranks.post(rank, messages)) pending.push_back(operation);
    }
    for (const auto& operation : pending) ranks.wait(rank, operation);
    EXPECT_TRUE(ranks.cluster.synchronize(ranks.streams[rank], 20s));
  });
  // Of each communicator: the bytes of its sends, and of its receives. The first is what connects it.
  std::map<std::string, std::vector<std::size_t>> sent;
  std::map<std::string, std::vector<std::size_t>> received;
  for (const auto& call : ranks.cluster.calls()) {
    if (call.function == "ncclSend") sent[call.communicator].push_back(call.bytes);
    if (call.function == "ncclRecv") received[call.communicator].push_back(call.bytes);
  }
  EXPECT_EQ(sent.size(), 6u);
  EXPECT_EQ(sent, received);
  for (int from = 0; from < 3; ++from) {
    for (int to = 0; to < 3; ++to) {
      if (from == to) continue;
      std::vector<std::size_t> expected{0};
      for (const Planned& message : plan) {
        if (message.from == from && message.to == to) expected.push_back(message.count * sizeof(int));
      }
      EXPECT_EQ(sent["world device 0 edge " + std::to_string(from) + ">" + std::to_string(to)], expected);
    }
  }
}

TEST(PointToPoint, ABatchGoesToThePeersInRoundsThatPairRanksUp) {
  const std::uint64_t seed = someSeed();
  std::mt19937_64 rng(seed);
  constexpr int kSize = 5;
  DeviceGroups ranks(kSize, seed);
  std::vector<std::uint64_t> seeds(kSize);
  for (auto& one : seeds) one = rng();
  int data = 0;
  std::vector<int> received(kSize * kSize);
  for (const std::size_t bytes : {0, 4}) {  // the first batch connects them
    ranks.each([&](int rank) {
      std::mt19937_64 own(seeds[rank]);
      std::vector<DeviceGroups::Message> batch;
      for (int peer = 0; peer < kSize; ++peer) {
        if (peer == rank) continue;
        batch.push_back({true, peer, &data, bytes});
        batch.push_back({false, peer, &received[rank * kSize + peer], bytes});
      }
      std::ranges::shuffle(batch, own);
      for (const auto& operation : ranks.post(rank, batch)) EXPECT_TRUE(operation->awaitEnd());
    });
  }
  std::map<int, std::vector<std::string>> calls;
  for (const auto& call : ranks.cluster.calls()) {
    if (call.bytes == 4) calls[call.device].push_back(call.communicator);
  }
  for (int rank = 0; rank < kSize; ++rank) {
    std::vector<std::string> expected;
    for (int round = 0; round < kSize; ++round) {
      const int peer = (round - rank + kSize) % kSize;
      if (peer == rank) continue;
      const std::string edge = "world device 0 edge ";
      expected.push_back(edge + std::to_string(peer) + ">" + std::to_string(rank));
      expected.push_back(edge + std::to_string(rank) + ">" + std::to_string(peer));
    }
    EXPECT_EQ(calls[rank], expected) << "rank " << rank;
  }
}

TEST(PointToPoint, ASlowPeerHoldsUpNoOther) {
  DeviceGroups ranks(3, someSeed());
  std::vector<int> fromSlow(4, -1);
  std::vector<int> fromFast(4, -1);
  std::vector<int> slow(4, 1);
  std::vector<int> fast(4, 2);
  // Rank 1 is in a long kernel. Rank 0 has posted a receive from it first.
  ranks.cluster.hold(ranks.streams[1]);
  std::vector<OperationPtr> of(3);
  ranks.each([&](int rank) {
    if (rank == 0) {
      const auto both = ranks.post(0, {{false, 1, fromSlow.data(), 16}, {false, 2, fromFast.data(), 16}});
      of[1] = both[0];
      of[2] = both[1];
    } else {
      (void)ranks.post(rank, {{true, 0, rank == 1 ? slow.data() : fast.data(), 16}});
    }
  });
  EXPECT_TRUE(of[2]->awaitEnd());
  EXPECT_EQ(fromFast, fast);
  EXPECT_FALSE(of[1]->isDone());
  ranks.cluster.release(ranks.streams[1]);
  EXPECT_TRUE(of[1]->awaitEnd());
  EXPECT_EQ(fromSlow, slow);
}

TEST(PointToPoint, AReceiveThatWasPostedEarlyHoldsUpNoSendToTheSamePeer) {
  DeviceGroups ranks(2, someSeed());
  int there = 7;
  int here = -1;
  int late = -1;
  // Both post their receive first; rank 1 sends only what rank 0's message has brought.
  ranks.each([&](int rank) {
    if (rank == 0) {
      const auto receive = ranks.post(0, {{false, 1, &late, sizeof late}})[0];
      ranks.post(0, {{true, 1, &there, sizeof there}});
      ranks.wait(0, receive);
    } else {
      ranks.wait(1, ranks.post(1, {{false, 0, &here, sizeof here}})[0]);
      ranks.post(1, {{true, 0, &here, sizeof here}});
    }
    EXPECT_TRUE(ranks.cluster.synchronize(ranks.streams[rank], 20s));
  });
  EXPECT_EQ(late, 7);
}

TEST(PointToPoint, ARankSendsItselfWhatIsCopiedOnceBothSidesArePosted) {
  DeviceGroups ranks(2, someSeed());
  std::vector<int> first(50, 0);
  std::vector<int> second(50, 0);
  std::vector<int> out(50, 0);
  (void)ranks.runtime.cuda.setDevice(1);
  ranks.cluster.enqueue(ranks.streams[1], [&] { std::fill(out.begin(), out.end(), 5); });
  const auto sends = ranks.post(1, {{true, 1, out.data(), 200}, {true, 1, out.data(), 0}, {true, 1, out.data(), 8}});
  EXPECT_FALSE(sends[0]->isDone());
  const auto receives = ranks.post(1, {{false, 1, first.data(), 200}, {false, 1, nullptr, 0}});
  for (const auto& operation : {receives[0], receives[1], sends[0], sends[1]}) {
    ranks.wait(1, operation);
    EXPECT_TRUE(operation->awaitEnd());
    EXPECT_TRUE(operation->status()) << operation->status().toString();
  }
  EXPECT_EQ(first, std::vector<int>(50, 5));

  // Each is for the first with its tag.
  std::vector<int> third(2, 0);
  int one = 1;
  int two = 2;
  const auto tagged = ranks.post(1, {{true, 1, &two, 4, 2},
                                     {false, 1, third.data(), 4, 1},
                                     {true, 1, &one, 4, 1},
                                     {false, 1, third.data() + 1, 4, 2}});
  for (const auto& operation : tagged) ranks.wait(1, operation);
  EXPECT_TRUE(ranks.cluster.synchronize(ranks.streams[1], 20s));
  EXPECT_EQ(third, (std::vector<int>{1, 2}));

  const auto alone = ranks.post(1, {{true, 1, out.data(), 8, 3}});
  const auto wrong = ranks.post(1, {{false, 1, second.data(), 4}});
  for (const auto& operation : {sends[2], wrong[0]}) {
    EXPECT_TRUE(operation->awaitEnd());
    EXPECT_EQ(operation->status().toString(), "rank 1 receives 4 bytes with tag 0, rank 1 8 bytes with tag 0");
  }
  EXPECT_EQ(ranks.groups[1]->status().code(), StatusCode::kMismatch);
  EXPECT_EQ(alone[0]->status().code(), StatusCode::kMismatch);
}

TEST(PointToPoint, APeerThatNeverComesIsNamedWhenTheTimeoutOfConnectingHasPassed) {
  DeviceGroups ranks(2, someSeed(), 50ms);
  int data = 0;
  const auto operation = ranks.post(0, {{true, 1, &data, sizeof data}})[0];
  ASSERT_TRUE(operation->awaitEnd());
  EXPECT_EQ(operation->status().code(), StatusCode::kTimeout);
  EXPECT_EQ(operation->status().toString(), "world device 0 edge 0>1: 1 of 2 ranks have come");
  EXPECT_EQ(ranks.groups[0]->status().code(), StatusCode::kTimeout);
}

}  // namespace
}  // namespace farandole::transport
