#include <gtest/gtest.h>

#include <functional>
#include <future>

#include "tests/backend/transport/nccl/simulator/simulated_ranks.h"

namespace farandole::testing {
namespace {

class SimulatorMisuse : public ::testing::Test {
 protected:
  void SetUp() override {
    ranks_.join();
    EXPECT_TRUE(ranks_.cluster.violations().empty());
  }
  // What rank `rank` does, on a thread of its own, and what its stream does then.
  void on(int rank, const std::function<void()>& body) {
    ranks_.on(rank, body).join();
    (void)ranks_.synchronize(rank, 20ms);
  }
  ncclResult_t reduce(int rank, std::size_t count, ncclDataType_t dtype = ncclInt32, ncclRedOp_t op = ncclSum) {
    return nccl_.allReduce(buffer_[rank], buffer_[rank], count, dtype, op, ranks_.comm(rank), ranks_.stream(rank));
  }
  ncclResult_t send(int rank, int peer, std::size_t count = 1) {
    return nccl_.send(buffer_[rank], count, ncclInt32, peer, ranks_.comm(rank), ranks_.stream(rank));
  }
  ncclResult_t recv(int rank, int peer, std::size_t count = 1) {
    return nccl_.recv(buffer_[rank] + 8, count, ncclInt32, peer, ranks_.comm(rank), ranks_.stream(rank));
  }
  void expectViolation(const std::string& text) {
    EXPECT_TRUE(ranks_.violated(text)) << text << "; the last of " << ranks_.cluster.violations().size() << ": "
                                       << (ranks_.cluster.violations().empty() ? ""
                                                                               : ranks_.cluster.violations().back());
  }

  SimulatedRanks ranks_{2};
  const transport::NcclApi& nccl_ = ranks_.nccl;
  const transport::CudaApi& cuda_ = ranks_.cuda;
  int buffer_[2][64] = {};
};

TEST_F(SimulatorMisuse, DifferentCollectivesAreReported) {
  on(0, [&] { EXPECT_EQ(reduce(0, 1), ncclSuccess); });
  on(1, [&] { EXPECT_EQ(reduce(1, 2), ncclSuccess); });
  expectViolation("different collectives on 'world'");
  EXPECT_FALSE(ranks_.synchronize(0, 20ms));
}

TEST(SimulatorMisuseOfTwo, DifferentOperationsAndKindsAreReported) {
  for (const bool kind : {false, true}) {
    SimulatedRanks ranks(2);
    ranks.join();
    int value[2][2] = {};
    ranks.each([&](int rank) {
      if (kind && rank == 1) {
        EXPECT_EQ(ranks.nccl.broadcast(value[1], value[1], 1, ncclInt32, 0, ranks.comm(1), ranks.stream(1)),
                  ncclSuccess);
      } else {
        EXPECT_EQ(ranks.nccl.allReduce(value[rank], value[rank], 1, ncclInt32, rank == 0 ? ncclSum : ncclMax,
                                       ranks.comm(rank), ranks.stream(rank)),
                  ncclSuccess);
      }
      (void)ranks.synchronize(rank, 20ms);
    });
    EXPECT_TRUE(ranks.violated("different collectives"));
  }
}

TEST_F(SimulatorMisuse, AsymmetricGroupsOfMessagesAreReported) {
  on(0, [&] {
    EXPECT_EQ(nccl_.groupStart(), ncclSuccess);
    EXPECT_EQ(send(0, 1), ncclSuccess);
    EXPECT_EQ(send(0, 1), ncclSuccess);
    EXPECT_EQ(nccl_.groupEnd(), ncclSuccess);
  });
  on(1, [&] {
    EXPECT_EQ(recv(1, 0), ncclSuccess);
    EXPECT_EQ(recv(1, 0), ncclSuccess);
  });
  expectViolation("asymmetric grouping on 'world' from rank 0 to 1: 2 sent in one group, 1 received");
}

TEST_F(SimulatorMisuse, AsymmetricGroupsOfCollectivesAreReported) {
  on(0, [&] {
    EXPECT_EQ(nccl_.groupStart(), ncclSuccess);
    EXPECT_EQ(reduce(0, 1), ncclSuccess);
    EXPECT_EQ(reduce(0, 1), ncclSuccess);
    EXPECT_EQ(nccl_.groupEnd(), ncclSuccess);
  });
  on(1, [&] { EXPECT_EQ(reduce(1, 1), ncclSuccess); });
  expectViolation("asymmetric grouping of collectives");
}

TEST_F(SimulatorMisuse, DifferentSizesOfAMessageAreReported) {
  on(0, [&] { EXPECT_EQ(send(0, 1, 2), ncclSuccess); });
  on(1, [&] { EXPECT_EQ(recv(1, 0, 3), ncclSuccess); });
  expectViolation("different sizes on 'world' from rank 0 to 1: 8 bytes sent, 12 received");
}

TEST_F(SimulatorMisuse, TooManyCallsInAGroupAreReported) {
  on(0, [&] {
    EXPECT_EQ(nccl_.groupStart(), ncclSuccess);
    for (int i = 0; i < 2049; ++i) EXPECT_EQ(send(0, 1), ncclSuccess);
    EXPECT_NE(nccl_.groupEnd(), ncclSuccess);
  });
  expectViolation("more than 2048 calls");
}

TEST_F(SimulatorMisuse, OneCommunicatorOnTwoStreamsInAGroupIsReported) {
  const cudaStream_t other = ranks_.cluster.userStream(0);
  on(0, [&] {
    EXPECT_EQ(nccl_.groupStart(), ncclSuccess);
    EXPECT_EQ(send(0, 1), ncclSuccess);
    EXPECT_EQ(nccl_.recv(buffer_[0], 1, ncclInt32, 1, ranks_.comm(0), other), ncclSuccess);
    EXPECT_EQ(nccl_.groupEnd(), ncclSuccess);
  });
  expectViolation("different streams");
}

TEST_F(SimulatorMisuse, AnotherDeviceOrAStreamOfOneIsReported) {
  on(1, [&] { EXPECT_EQ(send(0, 1), ncclSuccess); });
  expectViolation("the current device is 1, the communicator's 0");
  on(0, [&] { EXPECT_EQ(nccl_.send(buffer_[0], 1, ncclInt32, 1, ranks_.comm(0), ranks_.stream(1)), ncclSuccess); });
  expectViolation("the stream is of another device");
}

TEST_F(SimulatorMisuse, UseAfterTheEndIsReported) {
  EXPECT_EQ(nccl_.commDestroy(ranks_.comm(0)), ncclSuccess);
  EXPECT_NE(nccl_.commDestroy(ranks_.comm(0)), ncclSuccess);
  expectViolation("ncclCommDestroy: the communicator 'world' of rank 0 was destroyed");
  EXPECT_NE(reduce(0, 1), ncclSuccess);
  expectViolation("ncclAllReduce: the communicator");
  EXPECT_EQ(nccl_.commAbort(ranks_.comm(1)), ncclSuccess);
  EXPECT_NE(nccl_.commAbort(ranks_.comm(1)), ncclSuccess);
  expectViolation("ncclCommAbort: the communicator");
}

TEST_F(SimulatorMisuse, TwoThreadsInOneCommunicatorAreReported) {
  on(0, [&] {
    EXPECT_EQ(nccl_.groupStart(), ncclSuccess);
    EXPECT_EQ(send(0, 1), ncclSuccess);
    on(0, [&] { EXPECT_EQ(recv(0, 1), ncclSuccess); });
    EXPECT_EQ(nccl_.groupEnd(), ncclSuccess);
  });
  expectViolation("two threads at once");
}

TEST_F(SimulatorMisuse, FreedStreamsAndEventsAreReported) {
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cuda_.streamCreate(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
  EXPECT_EQ(cuda_.eventCreate(&event, cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(cuda_.eventDestroy(event), cudaSuccess);
  EXPECT_NE(cuda_.eventQuery(event), cudaSuccess);
  expectViolation("cudaEventQuery: the event was destroyed");
  EXPECT_EQ(cuda_.streamDestroy(stream), cudaSuccess);
  EXPECT_NE(cuda_.streamDestroy(stream), cudaSuccess);
  expectViolation("cudaStreamDestroy: the stream was destroyed");
  EXPECT_EQ(ranks_.cluster.live(), (SimulatedCluster::Live{0, 0, 2, 0, 0, 0}));
}

TEST_F(SimulatorMisuse, MisuseOfResourcesIsReported) {
  void* memory = nullptr;
  void* registration = nullptr;
  EXPECT_EQ(nccl_.memAlloc(&memory, 100), ncclSuccess);
  EXPECT_EQ(nccl_.commRegister(ranks_.comm(0), memory, 100, &registration), ncclSuccess);
  EXPECT_EQ(ranks_.cluster.live(), (SimulatedCluster::Live{0, 0, 2, 0, 1, 1}));
  EXPECT_EQ(nccl_.memFree(memory), ncclSuccess);
  expectViolation("ncclMemFree: the memory is still registered");
  EXPECT_EQ(nccl_.commDeregister(ranks_.comm(0), registration), ncclSuccess);
  EXPECT_NE(nccl_.commDeregister(ranks_.comm(0), registration), ncclSuccess);
  expectViolation("ncclCommDeregister");
  EXPECT_NE(reduce(0, 1, ncclInt32, static_cast<ncclRedOp_t>(99)), ncclSuccess);
  expectViolation("no such reduction operation");
  EXPECT_NE(reduce(0, 1, ncclFloat8e4m3), ncclSuccess);
  expectViolation("this dtype is not simulated");
}

TEST_F(SimulatorMisuse, AReductionOperationAfterItsEndIsReported) {
  on(0, [&] {
    int factor = 2;
    ncclRedOp_t op = ncclSum;
    EXPECT_EQ(nccl_.redOpCreatePreMulSum(&op, &factor, ncclInt32, ncclScalarHostImmediate, ranks_.comm(0)),
              ncclSuccess);
    EXPECT_EQ(ranks_.cluster.live().redOps, 1);
    EXPECT_EQ(reduce(0, 1, ncclFloat32, op), ncclInvalidArgument);  // of another dtype
    EXPECT_EQ(nccl_.redOpDestroy(op, ranks_.comm(0)), ncclSuccess);
    EXPECT_EQ(reduce(0, 1, ncclInt32, op), ncclInvalidArgument);
  });
  expectViolation("ncclAllReduce: no such reduction operation");
}

TEST_F(SimulatorMisuse, AnIdThatIsUsedAgainOrThatNobodyGaveIsReported) {
  ncclUniqueId id;
  EXPECT_EQ(nccl_.getUniqueId(&id), ncclSuccess);
  EXPECT_EQ(ranks_.init(0, 1, id), ncclSuccess);
  EXPECT_EQ(ranks_.init(0, 1, id), ncclInvalidArgument);
  expectViolation("this id was used up");
  id = {};
  EXPECT_EQ(ranks_.init(0, 1, id), ncclInvalidArgument);
  expectViolation("this id is not of ncclGetUniqueId");
}

TEST_F(SimulatorMisuse, WhatIsNotSimulatedIsReported) {
  ncclUniqueId id;
  EXPECT_EQ(nccl_.getUniqueId(&id), ncclSuccess);
  ncclComm_t communicator = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  EXPECT_EQ(nccl_.commInitRankConfig(&communicator, 1, id, 0, &config), ncclInvalidUsage);
  expectViolation("not simulated without blocking");
  EXPECT_EQ(nccl_.groupStart(), ncclSuccess);
  EXPECT_EQ(ranks_.init(0, 1, id), ncclInvalidUsage);
  EXPECT_EQ(nccl_.groupEnd(), ncclSuccess);
  expectViolation("not simulated in a group");
  EXPECT_EQ(nccl_.groupEnd(), ncclInvalidUsage);
  expectViolation("no group was begun");
}

TEST_F(SimulatorMisuse, AMessageToItselfWithoutItsReceiveIsRefused) {
  on(0, [&] { EXPECT_EQ(send(0, 0), ncclInvalidUsage); });
}

TEST_F(SimulatorMisuse, AGraphOfADestroyedCommunicatorIsReported) {
  ranks_.cluster.beginCapture(ranks_.stream(0));
  EXPECT_EQ(reduce(0, 1), ncclSuccess);
  ranks_.cluster.endCapture(ranks_.stream(0));
  EXPECT_EQ(nccl_.commDestroy(ranks_.comm(0)), ncclSuccess);
  ranks_.cluster.replay(ranks_.stream(0));
  EXPECT_TRUE(ranks_.synchronize(0));
  expectViolation("launched on a communicator that has ended");
}

}  // namespace
}  // namespace farandole::testing
