#include <gtest/gtest.h>

#include <array>
#include <atomic>

#include "tests/backend/transport/nccl/simulator/simulated_ranks.h"

namespace farandole::testing {
namespace {

TEST(SimulatorStreams, AnEventIsReadyWhenItsRecordingRan) {
  SimulatedRanks ranks(1);
  cudaEvent_t event = nullptr;
  EXPECT_EQ(ranks.cuda.eventCreate(&event, 0), cudaSuccess);
  EXPECT_EQ(ranks.cuda.eventQuery(event), cudaSuccess);  // never recorded
  ranks.cluster.hold(ranks.stream(0));
  EXPECT_EQ(ranks.cuda.eventRecord(event, ranks.stream(0)), cudaSuccess);
  EXPECT_EQ(ranks.cuda.eventQuery(event), cudaErrorNotReady);
  EXPECT_FALSE(ranks.synchronize(0, 20ms));
  ranks.cluster.release(ranks.stream(0));
  EXPECT_TRUE(ranks.synchronize(0));
  EXPECT_EQ(ranks.cuda.eventQuery(event), cudaSuccess);
}

TEST(SimulatorStreams, AWaitIsForTheRecordingThatWasTheLastWhenItWasCalled) {
  SimulatedRanks ranks(1);
  const cudaStream_t first = ranks.cluster.userStream(0), second = ranks.cluster.userStream(0);
  cudaEvent_t event = nullptr;
  EXPECT_EQ(ranks.cuda.eventCreate(&event, 0), cudaSuccess);
  ranks.cluster.hold(first);
  EXPECT_EQ(ranks.cuda.eventRecord(event, first), cudaSuccess);
  EXPECT_EQ(ranks.cuda.streamWaitEvent(ranks.stream(0), event, 0), cudaSuccess);
  EXPECT_EQ(ranks.cuda.eventRecord(event, second), cudaSuccess);  // at once; the wait is not for this one
  EXPECT_EQ(ranks.cuda.eventDestroy(event), cudaSuccess);
  EXPECT_FALSE(ranks.synchronize(0, 20ms));
  ranks.cluster.hold(second);
  ranks.cluster.release(first);
  EXPECT_TRUE(ranks.synchronize(0));
  EXPECT_TRUE(ranks.cluster.violations().empty());
}

TEST(SimulatorStreams, WhatADestroyedStreamHoldsStillRuns) {
  SimulatedRanks ranks(1);
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  std::atomic<bool> ran{false};
  EXPECT_EQ(ranks.cuda.streamCreate(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
  EXPECT_EQ(ranks.cuda.eventCreate(&event, 0), cudaSuccess);
  ranks.cluster.hold(ranks.stream(0));
  EXPECT_EQ(ranks.cuda.eventRecord(event, ranks.stream(0)), cudaSuccess);
  EXPECT_EQ(ranks.cuda.streamWaitEvent(stream, event, 0), cudaSuccess);
  ranks.cluster.enqueue(stream, [&] { ran = true; });
  EXPECT_EQ(ranks.cuda.eventRecord(event, stream), cudaSuccess);
  EXPECT_EQ(ranks.cuda.streamDestroy(stream), cudaSuccess);
  EXPECT_EQ(ranks.cluster.live().streams, 0);
  ranks.cluster.release(ranks.stream(0));
  EXPECT_EQ(ranks.cuda.streamWaitEvent(ranks.stream(0), event, 0), cudaSuccess);
  EXPECT_TRUE(ranks.synchronize(0));
  EXPECT_TRUE(ran);
}

// Rank 0 sends to 1 and 2 in one group, rank 1 passes on to 2, which takes that first: it works only where a kernel's
// messages go each when its peer is there.
TEST(SimulatorStreams, TheMessagesOfAKernelDoNotWaitForEachOther) {
  SimulatedRanks ranks(3);
  ranks.join();
  std::array<int, 3> got = {5, 0, 0};
  int passed = 0;
  const auto& nccl = ranks.nccl;
  ranks.each([&](int rank) {
    const ncclComm_t comm = ranks.comm(rank);
    const cudaStream_t stream = ranks.stream(rank);
    if (rank == 0) {
      EXPECT_EQ(nccl.groupStart(), ncclSuccess);
      EXPECT_EQ(nccl.groupStart(), ncclSuccess);
      EXPECT_EQ(nccl.send(&got[0], 1, ncclInt32, 2, comm, stream), ncclSuccess);
      EXPECT_EQ(nccl.groupEnd(), ncclSuccess);
      EXPECT_EQ(nccl.send(&got[0], 1, ncclInt32, 1, comm, stream), ncclSuccess);
      EXPECT_EQ(nccl.groupEnd(), ncclSuccess);
    } else if (rank == 1) {
      EXPECT_EQ(nccl.recv(&got[1], 1, ncclInt32, 0, comm, stream), ncclSuccess);
      EXPECT_EQ(nccl.send(&got[1], 1, ncclInt32, 2, comm, stream), ncclSuccess);
    } else {
      EXPECT_EQ(nccl.recv(&passed, 1, ncclInt32, 1, comm, stream), ncclSuccess);
      EXPECT_EQ(nccl.recv(&got[2], 1, ncclInt32, 0, comm, stream), ncclSuccess);
    }
    EXPECT_TRUE(ranks.synchronize(rank));
  });
  EXPECT_EQ(passed, 5);
  EXPECT_EQ(got, (std::array<int, 3>{5, 5, 5}));
  EXPECT_TRUE(ranks.cluster.violations().empty());
}

TEST(SimulatorStreams, AMessageWaitsForItsReceiverAndTheKernelsOfACommunicatorForEachOther) {
  SimulatedRanks ranks(2);
  ranks.join();
  const cudaStream_t other = ranks.cluster.userStream(0);
  int value = 1, received = 0, back = 0;
  ranks
      .on(0,
          [&] {
            EXPECT_EQ(ranks.nccl.send(&value, 1, ncclInt32, 1, ranks.comm(0), ranks.stream(0)), ncclSuccess);
            EXPECT_EQ(ranks.nccl.recv(&back, 1, ncclInt32, 1, ranks.comm(0), other), ncclSuccess);
          })
      .join();
  ranks
      .on(1,
          [&] {
            const cudaStream_t late = ranks.cluster.userStream(1);
            ranks.cluster.hold(late);
            EXPECT_EQ(ranks.nccl.recv(&received, 1, ncclInt32, 0, ranks.comm(1), late), ncclSuccess);
            EXPECT_EQ(ranks.nccl.send(&value, 1, ncclInt32, 0, ranks.comm(1), ranks.stream(1)), ncclSuccess);
            EXPECT_FALSE(ranks.cluster.synchronize(other, 20ms));
            ranks.cluster.release(late);
            EXPECT_TRUE(ranks.cluster.synchronize(other, 10s));
          })
      .join();
  EXPECT_EQ(received + back, 2);
}

}  // namespace
}  // namespace farandole::testing
