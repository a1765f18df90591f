// Tags of messages between devices, which NCCL has none of.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/backend/transport/nccl/device_groups.h"
#include "tests/random_seed.h"

namespace farandole::transport {
namespace {

using farandole::testing::someSeed;
using testing::DeviceGroups;
using testing::joined;
using namespace std::chrono_literals;

TEST(PointToPointTags, BatchesThatAreListedInAnotherOrderOnEachRankAreMatchedByTheirTags) {
  const std::uint64_t first = someSeed();
  for (std::uint64_t seed = first; seed < first + 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed);
    const int size = 2 + static_cast<int>(rng() % 3);
    DeviceGroups ranks(size, seed);
    // Every step the same messages, each with a tag of its own, which the receiver must find in its buffer.
    constexpr int kTags = 3;
    constexpr int kSteps = 4;
    const auto cell = [&](int from, int to, int tag) { return (from * size + to) * kTags + tag; };
    std::vector<int> sent(size * size * kTags);
    std::vector<int> received(sent.size(), -1);
    std::vector<std::uint64_t> seeds(size);
    for (auto& one : seeds) one = rng();
    for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<int>(i);
    ranks.each([&](int rank) {
      std::mt19937_64 own(seeds[rank]);
      for (int step = 0; step < kSteps; ++step) {
        std::vector<DeviceGroups::Message> batch;
        for (int peer = 0; peer < size; ++peer) {
          for (int tag = 0; tag < kTags; ++tag) {
            const auto written = static_cast<std::uint32_t>(tag);
            batch.push_back({true, peer, &sent[cell(rank, peer, tag)], sizeof(int), written});
            batch.push_back({false, peer, &received[cell(peer, rank, tag)], sizeof(int), written});
          }
        }
        std::ranges::shuffle(batch, own);
        const auto operations = ranks.post(rank, batch);
        for (const auto& operation : operations) ranks.wait(rank, operation);
        EXPECT_TRUE(ranks.cluster.synchronize(ranks.streams[rank], 20s));
        for (int peer = 0; peer < size; ++peer) {
          for (int tag = 0; tag < kTags; ++tag) {
            EXPECT_EQ(std::exchange(received[cell(peer, rank, tag)], -1), cell(peer, rank, tag));
          }
        }
        for (const auto& operation : operations) EXPECT_TRUE(operation->awaitEnd());
      }
    });
    for (const auto& group : ranks.groups) EXPECT_TRUE(group->status()) << group->status().toString();
    ranks.close();
    EXPECT_EQ(joined(ranks.cluster.violations()), "");
    if (HasFailure()) return;
  }
}

TEST(PointToPointTags, MessagesThatDoNotFitEachOtherEndTheGroupAndBothRanksSayWhy) {
  struct Case {
    std::vector<DeviceGroups::Message> sent;
    std::vector<DeviceGroups::Message> received;
  };
  std::vector<int> data(8);
  const std::vector<Case> cases{
      {{{true, 1, data.data(), 8, 1}}, {{false, 0, data.data() + 4, 8, 2}}},
      {{{true, 1, data.data(), 8}}, {{false, 0, data.data() + 4, 4}}},
      {{{true, 1, data.data(), 8, 0, 3}}, {{false, 0, data.data() + 4, 8, 0, 4}}},
      // In two batches, against the order here.
      {{{true, 1, data.data(), 8, 2}, {true, 1, data.data(), 8, 1}},
       {{false, 0, data.data() + 4, 8, 2}, {false, 0, data.data() + 4, 8, 3}}},
  };
  for (const Case& one : cases) {
    DeviceGroups ranks(2, someSeed());
    ranks.each([&](int rank) {
      const auto operations = ranks.post(rank, rank == 0 ? one.sent : one.received);
      const auto deadline = DeviceClock::now() + 20s;
      while (ranks.groups[rank]->status() && DeviceClock::now() < deadline) std::this_thread::sleep_for(1ms);
      for (const auto& operation : operations) EXPECT_TRUE(operation->awaitEnd());
      const std::string text = ranks.groups[rank]->status().toString();
      EXPECT_NE(text.find("bytes with tag"), std::string::npos) << text;
    });
  }
}

}  // namespace
}  // namespace farandole::transport
