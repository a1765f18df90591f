#include "backend/c10d/edge_messages.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "backend/c10d/contract.h"
#include "tests/backend/collective/communicators.h"
#include "tests/random_seed.h"

namespace farandole::backend {
namespace {

using collective::testing::Group;
using farandole::testing::someSeed;
using transport::EdgeWord;
using namespace std::chrono_literals;

bool waitFor(const std::function<bool()>& isDone) {
  for (const auto deadline = transport::Clock::now() + 20s; !isDone(); std::this_thread::sleep_for(1ms)) {
    if (transport::Clock::now() > deadline) return false;
  }
  return true;
}

// Words that count up, so that one that is lost or in the wrong place is seen.
std::vector<EdgeWord> words(std::uint64_t first, std::size_t count, std::uint16_t device) {
  std::vector<EdgeWord> all;
  for (std::size_t i = 0; i < count; ++i) all.push_back({7, 3, EdgeWord::kIsWord, device, first + i});
  return all;
}

// What one rank has heard, for each peer.
struct Heard {
  std::mutex mutex;
  std::map<int, std::vector<std::uint64_t>> from;
  std::size_t total = 0;

  transport::EdgeTalk::Listener listener() {
    return [this](int peer, std::span<const EdgeWord> told) {
      std::lock_guard lock(mutex);
      for (const EdgeWord& word : told) from[peer].push_back(word.bytes);
      total += told.size();
    };
  }
  std::size_t count() {
    std::lock_guard lock(mutex);
    return total;
  }
};

TEST(EdgeMessages, WhatIsToldIsHeardByThePeersListenerForTheDeviceInItsOrder) {
  const std::uint64_t seed = someSeed();
  for (const std::size_t eager : {std::size_t{0}, std::size_t{1} << 20, Group::kSharedMemory}) {
    std::mt19937_64 rng(seed);
    constexpr int kSize = 3;
    constexpr int kDevices = 2;
    constexpr std::size_t kWords = 300;
    Group group(kSize, eager);
    std::vector<std::shared_ptr<EdgeMessages>> talks;
    Heard heard[kSize][kDevices];
    for (int rank = 0; rank < kSize; ++rank) talks.push_back(std::make_shared<EdgeMessages>(group[rank]));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kSize; ++rank) {
      threads.emplace_back([&, rank, own = std::mt19937_64(rng())]() mutable {
        for (int device = 0; device < kDevices; ++device) {
          // Some listen only when they have been told.
          if (own() % 2 == 0) std::this_thread::sleep_for(2ms);
          talks[rank]->listen(device, heard[rank][device].listener());
          for (int peer = 0; peer < kSize; ++peer) {
            if (peer == rank) continue;
            talks[rank]->open(peer);
            for (std::size_t told = 0; told < kWords;) {
              const std::size_t count = std::min(kWords - told, 1 + own() % 70);
              talks[rank]->tell(peer, words(told, count, static_cast<std::uint16_t>(device)));
              told += count;
            }
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (auto& devices : heard) {
      for (Heard& one : devices) {
        EXPECT_TRUE(waitFor([&] { return one.count() == kWords * (kSize - 1); })) << one.count();
        std::lock_guard lock(one.mutex);
        for (const auto& [peer, numbers] : one.from) {
          for (std::size_t i = 0; i < numbers.size(); ++i) ASSERT_EQ(numbers[i], i) << "from rank " << peer;
        }
      }
    }
    // It is nothing that a rank waits for.
    EXPECT_EQ(group[0]->describePending(), "nothing is pending");
    for (int rank = 0; rank < kSize; ++rank) group[rank]->abort(Status::aborted("the test is over"));
  }
}

TEST(EdgeMessages, TheEndOfTheGroupLetsGoOfEverything) {
  Group group(2, Group::kSharedMemory);
  std::vector<std::weak_ptr<EdgeMessages>> gone;
  for (int rank = 0; rank < 2; ++rank) {
    const auto talk = std::make_shared<EdgeMessages>(group[rank]);
    gone.emplace_back(talk);
    talk->open(1 - rank);
    // One of them is not heard: there is nobody to listen.
    talk->tell(1 - rank, words(0, 100, 0));
  }
  for (const auto& talk : gone) EXPECT_TRUE(talk.expired());
  for (int rank = 0; rank < 2; ++rank) {
    group[rank]->abort(Status::aborted("the test is over"));
    EXPECT_TRUE(waitFor([&] { return group[rank].use_count() == 1; })) << group[rank].use_count();
  }
}

TEST(EdgeMessages, ADifferenceNamesBothRanksAndWhatTheySendAndReceive) {
  Group group(2, 0);
  const EdgeMessages talk(group[1]);
  const std::uint32_t floats = elementOf(at::kFloat);
  const std::uint32_t longs = elementOf(at::kLong);
  const Status status = talk.describe(0, /*isSend=*/false, {{3, longs, 16}, {4, floats, 12}});
  EXPECT_EQ(status.code(), StatusCode::kMismatch);
  for (const char* const part :
       {"rank 1 (host host, pid 1) receives 2 x Long (16 bytes) with tag 3",
        "rank 0 (host host, pid 0) sends 3 x Float (12 bytes) with tag 4", "expected the same"}) {
    EXPECT_NE(status.toString().find(part), std::string::npos) << status.toString();
  }
}

}  // namespace
}  // namespace farandole::backend
