// Messages that a graph has captured, and how a group with graphs ends.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "tests/backend/transport/nccl/device_groups.h"
#include "tests/random_seed.h"

namespace farandole::transport {
namespace {

using farandole::testing::someSeed;
using testing::DeviceGroups;
using testing::joined;
using namespace std::chrono_literals;

TEST(CapturedMessages, WhatWasCapturedIsSentAgainAndAgain) {
  DeviceGroups ranks(2, someSeed());
  int sent = 0;
  int received = -1;
  const auto exchange = [&](int rank) {
    return ranks.post(rank, {{rank == 0, 1 - rank, rank == 0 ? &sent : &received, sizeof(int)}})[0];
  };
  const auto refused = [&] {
    ranks.cluster.beginCapture(ranks.streams[0]);
    const auto operation = exchange(0);
    ranks.cluster.endCapture(ranks.streams[0]);
    return operation->status();
  }();
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument) << refused.toString();
  EXPECT_NE(refused.toString().find("edge 0>1 is not connected"), std::string::npos) << refused.toString();
  ASSERT_TRUE(ranks.groups[0]->status());

  ranks.each([&](int rank) { EXPECT_TRUE(exchange(rank)->awaitEnd()); });
  // One capture after the other: the simulator's, as CUDA's global mode, tolerates no call of others that may wait.
  for (int rank = 0; rank < 2; ++rank) {
    (void)ranks.runtime.cuda.setDevice(rank);
    ranks.cluster.beginCapture(ranks.streams[rank]);
    const auto operation = exchange(rank);
    EXPECT_TRUE(operation->status()) << operation->status().toString();
    ranks.wait(rank, operation);
    ranks.cluster.endCapture(ranks.streams[rank]);
  }
  for (sent = 1; sent <= 3; ++sent) {
    for (int rank = 0; rank < 2; ++rank) ranks.cluster.replay(ranks.streams[rank]);
    for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(ranks.cluster.synchronize(ranks.streams[rank], 20s));
    EXPECT_EQ(received, sent);
  }
  EXPECT_EQ(joined(ranks.cluster.violations()), "");
}

// A message from rank 0 to rank 1 and a collective, which nobody replays.
void capture(DeviceGroups& ranks) {
  static int sent = 0;
  static int received = 0;
  static std::vector<std::vector<int>> summed(2, std::vector<int>(4));
  const auto exchange = [&](int rank) {
    return ranks.post(rank, {{rank == 0, 1 - rank, rank == 0 ? &sent : &received, sizeof(int)}})[0];
  };
  ranks.each([&](int rank) {
    EXPECT_TRUE(exchange(rank)->awaitEnd());
    EXPECT_TRUE(ranks.run(rank, false, sumOf(ranks, summed[rank]))->awaitEnd());
  });
  for (int rank = 0; rank < 2; ++rank) {
    (void)ranks.runtime.cuda.setDevice(rank);
    ranks.cluster.beginCapture(ranks.streams[rank]);
    ranks.wait(rank, exchange(rank));
    ranks.wait(rank, ranks.run(rank, false, sumOf(ranks, summed[rank])));
    ranks.cluster.endCapture(ranks.streams[rank]);
  }
}

TEST(CapturedMessages, GraphsThatStillExistHoldUpNeitherTheEndOfTheGroupNorAnAbort) {
  for (const bool isAborted : {false, true}) {
    DeviceGroups ranks(2, someSeed());
    ranks.cluster.setGraphsStay(true);
    capture(ranks);
    const auto begin = DeviceClock::now();
    if (isAborted) {
      for (const auto& group : ranks.groups) group->abort(Status::aborted("enough"));
    } else {
      ranks.close();
    }
    EXPECT_LT(DeviceClock::now() - begin, 3500ms);  // it is 2 s for all
    EXPECT_EQ(ranks.cluster.live().communicators, 4);
    ranks.cluster.setGraphsStay(false);
  }
}

// Else a process that ends next takes along what its peers do not have yet.
TEST(CapturedMessages, AGroupWhoseGraphsAreGoneEndsWhenNcclHasSentAll) {
  DeviceGroups ranks(2, someSeed());
  capture(ranks);
  ranks.cluster.setGraphsStay(true);
  std::thread graphs([&] {
    std::this_thread::sleep_for(300ms);  // NCCL sends
    ranks.cluster.setGraphsStay(false);
  });
  ranks.close();
  EXPECT_EQ(ranks.cluster.live().communicators, 0);
  graphs.join();
}

}  // namespace
}  // namespace farandole::transport
