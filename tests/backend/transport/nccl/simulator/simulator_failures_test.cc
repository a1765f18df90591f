#include <gtest/gtest.h>

#include <future>
#include <optional>

#include "tests/backend/transport/nccl/simulator/simulated_ranks.h"

namespace farandole::testing {
namespace {

// Two ranks of which rank 0 waits for rank 1 in a collective.
class SimulatorStuck : public ::testing::Test {
 protected:
  void SetUp() override {
    ranks_.join();
    reduce(0);
    EXPECT_FALSE(ranks_.synchronize(0, 20ms));
  }
  void reduce(int rank) {
    std::thread thread = ranks_.on(rank, [this, rank] {
      EXPECT_EQ(ranks_.nccl.allReduce(&values_[rank], &values_[rank], 1, ncclFloat32, ncclSum, ranks_.comm(rank),
                                      ranks_.stream(rank)),
                ncclSuccess);
    });
    thread.join();
  }
  ncclResult_t asyncError(int rank) {
    ncclResult_t error = ncclSuccess;
    EXPECT_EQ(ranks_.nccl.commGetAsyncError(ranks_.comm(rank), &error), ncclSuccess);
    return error;
  }

  SimulatedRanks ranks_{2};
  float values_[2] = {1, 2};
};

TEST_F(SimulatorStuck, AnAbortEndsTheRanksKernelWithoutDataAndLeavesThePeerStuck) {
  EXPECT_EQ(ranks_.nccl.commAbort(ranks_.comm(0)), ncclSuccess);
  EXPECT_TRUE(ranks_.synchronize(0));
  reduce(1);
  EXPECT_FALSE(ranks_.synchronize(1, 20ms));
  EXPECT_EQ(values_[0], 1);
  EXPECT_EQ(values_[1], 2);
  EXPECT_EQ(ranks_.nccl.commAbort(ranks_.comm(1)), ncclSuccess);
  EXPECT_TRUE(ranks_.synchronize(1));
  EXPECT_EQ(ranks_.cluster.live().communicators, 0);
  EXPECT_TRUE(ranks_.cluster.violations().empty());
}

TEST_F(SimulatorStuck, ADeadRankIsToldByTheAsyncErrorAndItsPeerStaysStuckUntilItAborts) {
  ranks_.cluster.killRank(1);
  EXPECT_EQ(asyncError(0), ncclRemoteError);
  reduce(1);  // too late
  EXPECT_FALSE(ranks_.synchronize(0, 20ms));
  EXPECT_EQ(ranks_.nccl.commAbort(ranks_.comm(0)), ncclSuccess);
  EXPECT_TRUE(ranks_.synchronize(0));
}

TEST_F(SimulatorStuck, ARevokedCommunicatorEndsItsKernelsAndCanBeDestroyed) {
  EXPECT_EQ(ranks_.nccl.commRevoke(ranks_.comm(0), 0), ncclSuccess);
  EXPECT_TRUE(ranks_.synchronize(0));
  EXPECT_EQ(ranks_.nccl.send(values_, 1, ncclFloat32, 1, ranks_.comm(0), ranks_.stream(0)), ncclInvalidUsage);
  EXPECT_EQ(ranks_.nccl.commDestroy(ranks_.comm(0)), ncclSuccess);
  EXPECT_TRUE(ranks_.cluster.violations().empty());
}

TEST_F(SimulatorStuck, DestroyWaitsForTheKernelsAndAnAbortFromAnotherThreadEndsTheWait) {
  auto destroyed = std::async(std::launch::async, [this] { return ranks_.nccl.commDestroy(ranks_.comm(0)); });
  EXPECT_TRUE(ranks_.cluster.waitUntilBlocked(1, 10s));
  EXPECT_EQ(ranks_.nccl.commAbort(ranks_.comm(0)), ncclSuccess);
  EXPECT_EQ(destroyed.get(), ncclInternalError);
}

TEST_F(SimulatorStuck, TheClusterEndsWhateverIsPending) {
  // Rank 0 waits in its stream, another thread on the host; the fixture destroys the cluster.
  ranks_.cluster.hold(ranks_.stream(1));
  reduce(1);
}

TEST(SimulatorFailures, TheEndOfTheClusterEndsCallsThatAreBlocked) {
  std::optional<SimulatedRanks> ranks(2);
  ranks->communicators.assign(2, nullptr);
  const transport::NcclApi nccl = ranks->nccl;
  ncclUniqueId id;
  ASSERT_EQ(nccl.getUniqueId(&id), ncclSuccess);
  ncclComm_t communicator = nullptr;
  auto joined = std::async(std::launch::async, [&] {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    return nccl.commInitRankConfig(&communicator, 2, id, 0, &config);
  });
  EXPECT_TRUE(ranks->cluster.waitUntilBlocked(1, 10s));
  ranks.reset();
  EXPECT_EQ(joined.get(), ncclSystemError);
  EXPECT_EQ(nccl.groupStart(), ncclUnhandledCudaError);  // there is no cluster any more
}

TEST(SimulatorFailures, ARankThatWaitsToJoinADeadOneIsTold) {
  SimulatedRanks ranks(2);
  ranks.communicators.assign(2, nullptr);
  ncclUniqueId id;
  ASSERT_EQ(ranks.nccl.getUniqueId(&id), ncclSuccess);
  auto joined = std::async(std::launch::async, [&] { return ranks.init(0, 2, id); });
  EXPECT_TRUE(ranks.cluster.waitUntilBlocked(1, 10s));
  ranks.cluster.killRank(1);
  EXPECT_EQ(joined.get(), ncclRemoteError);
  EXPECT_EQ(ranks.comm(0), nullptr);
  EXPECT_EQ(ranks.cluster.live().communicators, 0);
}

TEST(SimulatorFailures, JoiningTwiceAsOneRankOrWithAnotherSizeIsRefused) {
  SimulatedRanks ranks(2);
  ranks.communicators.assign(2, nullptr);
  for (const int size : {2, 3}) {
    ncclUniqueId id;
    ASSERT_EQ(ranks.nccl.getUniqueId(&id), ncclSuccess);
    ranks.each([&](int rank) {
      ncclComm_t communicator = nullptr;
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      EXPECT_EQ(ranks.nccl.commInitRankConfig(&communicator, rank == 0 ? 2 : size, id, size == 2 ? 0 : rank, &config),
                ncclInvalidArgument);
    });
  }
  EXPECT_EQ(ranks.cluster.live().communicators, 0);
}

TEST(SimulatorFailures, TheFirstUseOfAConnectionBlocksUntilThePeerUsesItWhereThatIsAsked) {
  SimulatedRanks ranks(2);
  ranks.join();
  ranks.cluster.setConnectsBlock(true);
  int value = 7, received = 0;
  const auto send = [&] { return ranks.nccl.send(&value, 1, ncclInt32, 1, ranks.comm(0), ranks.stream(0)); };
  auto sent = std::async(std::launch::async, send);
  EXPECT_TRUE(ranks.cluster.waitUntilBlocked(1, 10s));
  ranks
      .on(1,
          [&] { EXPECT_EQ(ranks.nccl.recv(&received, 1, ncclInt32, 0, ranks.comm(1), ranks.stream(1)), ncclSuccess); })
      .join();
  EXPECT_EQ(sent.get(), ncclSuccess);
  EXPECT_TRUE(ranks.synchronize(1));
  EXPECT_EQ(received, 7);
  EXPECT_EQ(send(), ncclSuccess);  // connected
  EXPECT_TRUE(ranks.cluster.violations().empty());
}

TEST(SimulatorFailures, AConnectionThatIsWaitedForEndsWithThePeerOrWithAnAbort) {
  for (const bool killed : {true, false}) {
    SimulatedRanks ranks(2);
    ranks.join();
    ranks.cluster.setConnectsBlock(true);
    int value = 7;
    auto sent = std::async(std::launch::async,
                           [&] { return ranks.nccl.send(&value, 1, ncclInt32, 1, ranks.comm(0), ranks.stream(0)); });
    EXPECT_TRUE(ranks.cluster.waitUntilBlocked(1, 10s));
    if (killed) {
      ranks.cluster.killRank(1);
    } else {
      EXPECT_EQ(ranks.nccl.commAbort(ranks.comm(0)), ncclSuccess);
    }
    EXPECT_EQ(sent.get(), killed ? ncclRemoteError : ncclInternalError);
    EXPECT_TRUE(ranks.synchronize(0));  // nothing was put there
  }
}

TEST(SimulatorFailures, TheNthCallFailsAndEndsItsGroup) {
  SimulatedRanks ranks(1);
  ranks.join();
  int value = 7, received = 0;
  const auto toSelf = [&] {
    EXPECT_EQ(ranks.nccl.groupStart(), ncclSuccess);
    const ncclResult_t sent = ranks.nccl.send(&value, 1, ncclInt32, 0, ranks.comm(0), ranks.stream(0));
    const ncclResult_t taken = ranks.nccl.recv(&received, 1, ncclInt32, 0, ranks.comm(0), ranks.stream(0));
    return std::vector<ncclResult_t>{sent, taken, ranks.nccl.groupEnd()};
  };
  ranks.cluster.failNccl("ncclSend", 2, ncclSystemError);
  EXPECT_EQ(toSelf(), (std::vector<ncclResult_t>{ncclSuccess, ncclSuccess, ncclSuccess}));
  EXPECT_TRUE(ranks.synchronize(0));
  EXPECT_EQ(std::exchange(received, 0), 7);
  EXPECT_EQ(toSelf(), (std::vector<ncclResult_t>{ncclSystemError, ncclSuccess, ncclSystemError}));
  EXPECT_TRUE(ranks.synchronize(0));
  EXPECT_EQ(received, 0);
  ranks.cluster.failNccl("ncclGroupEnd", 1, ncclInternalError);
  EXPECT_EQ(toSelf(), (std::vector<ncclResult_t>{ncclSuccess, ncclSuccess, ncclInternalError}));
  EXPECT_EQ(received, 0);
  EXPECT_EQ(toSelf(), (std::vector<ncclResult_t>{ncclSuccess, ncclSuccess, ncclSuccess}));
  EXPECT_TRUE(ranks.synchronize(0));
  EXPECT_EQ(received, 7);
  EXPECT_EQ(ranks.cluster.callCounts().at("ncclSend"), 4);
}

TEST(SimulatorFailures, ACudaErrorStaysOnTheThreadUntilItIsTaken) {
  SimulatedRanks ranks(2);
  ranks.cluster.failCuda("cudaEventCreateWithFlags", 1, cudaErrorMemoryAllocation, 1);
  cudaEvent_t event = nullptr;
  EXPECT_EQ(ranks.cuda.eventCreate(&event, 0), cudaSuccess);  // another device
  EXPECT_EQ(ranks.cuda.setDevice(1), cudaSuccess);
  cudaEvent_t none = nullptr;
  EXPECT_EQ(ranks.cuda.eventCreate(&none, 0), cudaErrorMemoryAllocation);
  EXPECT_EQ(ranks.cuda.getLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(ranks.cuda.getLastError(), cudaSuccess);
  EXPECT_EQ(ranks.cluster.live().events, 1);
}

TEST(SimulatorFailures, AnAsyncErrorIsGivenToTheCommunicatorsOfItsDevice) {
  SimulatedRanks ranks(2);
  ranks.join();
  ranks.cluster.failAsync(0, ncclSystemError);
  ncclResult_t errors[2] = {};
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ranks.nccl.commGetAsyncError(ranks.comm(rank), &errors[rank]), ncclSuccess);
  }
  EXPECT_EQ(errors[0], ncclSystemError);
  EXPECT_EQ(errors[1], ncclSuccess);
  int value = 0;
  EXPECT_EQ(ranks.nccl.send(&value, 1, ncclInt32, 1, ranks.comm(0), ranks.stream(0)), ncclSystemError);
}

TEST(SimulatorFailures, WithoutTheNewerFunctionsTheyAreNull) {
  SimulatedRanks ranks(1);
  EXPECT_NE(ranks.nccl.commRevoke, nullptr);
  ranks.cluster.setNewerFunctions(false);
  EXPECT_EQ(ranks.cluster.nccl().commRevoke, nullptr);
  EXPECT_NE(ranks.cluster.nccl().send, nullptr);
}

// Every rank's thread issues while another one aborts its communicators at some moment: everybody comes back, and the
// streams go on.
TEST(SimulatorFailures, AbortsAtAnyMomentLeaveNothingStuck) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    SimulatedRanks ranks(3, seed);
    ranks.join();
    ranks.cluster.setConnectsBlock(seed % 2 == 0);
    std::thread aborts([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(seed * 40));
      for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.nccl.commAbort(ranks.comm(rank)), ncclSuccess);
    });
    std::vector<int> values(6);
    ranks.each([&](int rank) {
      const int next = (rank + 1) % 3, last = (rank + 2) % 3;
      int* const value = &values[static_cast<std::size_t>(rank) * 2];
      ncclResult_t result = ncclSuccess;
      while (result == ncclSuccess) {
        EXPECT_EQ(ranks.nccl.groupStart(), ncclSuccess);
        (void)ranks.nccl.send(value, 1, ncclInt32, next, ranks.comm(rank), ranks.stream(rank));
        (void)ranks.nccl.recv(value + 1, 1, ncclInt32, last, ranks.comm(rank), ranks.stream(rank));
        result = ranks.nccl.groupEnd();
      }
      EXPECT_TRUE(ranks.synchronize(rank)) << "seed " << seed;
    });
    aborts.join();
  }
}

}  // namespace
}  // namespace farandole::testing
