#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "tests/backend/transport/nccl/simulator/simulated_ranks.h"

namespace farandole::testing {
namespace {

int sumOver(SimulatedRanks& ranks, int rank, ncclComm_t communicator) {
  int value = rank + 1;
  EXPECT_EQ(ranks.nccl.allReduce(&value, &value, 1, ncclInt32, ncclSum, communicator, ranks.stream(rank)), ncclSuccess);
  EXPECT_TRUE(ranks.synchronize(rank));
  return value;
}

TEST(SimulatorMembers, AShrunkCommunicatorHasTheRanksThatAreLeftInTheirOrder) {
  SimulatedRanks ranks(4);
  ranks.join();
  ranks.each([&](int rank) {
    if (rank == 1) return;
    int excluded = 1;
    ncclComm_t part = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.commName = "part";
    config.maxCTAs = 4;
    EXPECT_EQ(ranks.nccl.commShrink(ranks.comm(rank), &excluded, 1, &part, &config, 0), ncclSuccess);
    ASSERT_NE(part, nullptr);
    const auto info = ranks.cluster.info(part);
    EXPECT_EQ(info.name, "part");
    EXPECT_EQ(info.rank, rank == 0 ? 0 : rank - 1);
    EXPECT_EQ(info.size, 3);
    EXPECT_EQ(info.maxCtas, 4);
    EXPECT_EQ(sumOver(ranks, rank, part), 8);
    int value = rank;
    EXPECT_EQ(ranks.nccl.broadcast(&value, &value, 1, ncclInt32, 1, part, ranks.stream(rank)), ncclSuccess);
    EXPECT_TRUE(ranks.synchronize(rank));
    EXPECT_EQ(value, 2);
    EXPECT_EQ(ranks.nccl.commDestroy(part), ncclSuccess);
  });
  EXPECT_TRUE(ranks.cluster.violations().empty());
  const std::vector<Call> calls = ranks.cluster.calls();
  EXPECT_TRUE(std::any_of(calls.begin(), calls.end(), [&](const Call& call) {
    return call.function == "ncclBroadcast" && call.communicator == "part" && call.peer == 1 && call.bytes == 4 &&
           call.device == 0 && call.stream == ranks.stream(0);
  }));
}

TEST(SimulatorMembers, AShrinkThatARankThatStaysDoesNotJoinFails) {
  SimulatedRanks ranks(3);
  ranks.join();
  ranks.cluster.killRank(1);
  int excluded = 2;
  ncclComm_t part = nullptr;
  EXPECT_EQ(ranks.nccl.commShrink(ranks.comm(0), &excluded, 1, &part, nullptr, 0), ncclRemoteError);
  EXPECT_EQ(part, nullptr);
}

TEST(SimulatorMembers, AShrunkCommunicatorWorksWithoutTheDeadRank) {
  SimulatedRanks ranks(3);
  ranks.join();
  ranks.cluster.killRank(1);
  ranks.each([&](int rank) {
    if (rank == 1) return;
    int value = 0;
    EXPECT_EQ(ranks.nccl.commRevoke(ranks.comm(rank), 0), ncclSuccess);
    int excluded = 1;
    ncclComm_t rest = nullptr;
    constexpr int kAbort = 1;
    EXPECT_EQ(ranks.nccl.commShrink(ranks.comm(rank), &excluded, 1, &rest, nullptr, kAbort), ncclSuccess);
    EXPECT_EQ(sumOver(ranks, rank, rest), 4);
    EXPECT_EQ(ranks.nccl.commGetAsyncError(rest, reinterpret_cast<ncclResult_t*>(&value)), ncclSuccess);
    EXPECT_EQ(value, ncclSuccess);
    EXPECT_EQ(ranks.nccl.commDestroy(rest), ncclSuccess);
    EXPECT_EQ(ranks.nccl.commDestroy(ranks.comm(rank)), ncclSuccess);
  });
  EXPECT_TRUE(ranks.cluster.violations().empty());
}

TEST(SimulatorMembers, WindowsAreRegisteredByAllRanksTogether) {
  SimulatedRanks ranks(2);
  ranks.join();
  ranks.each([&](int rank) {
    void* memory = nullptr;
    ncclWindow_t window = nullptr;
    EXPECT_EQ(ranks.nccl.memAlloc(&memory, 8192), ncclSuccess);
    EXPECT_EQ(ranks.nccl.commWindowRegister(ranks.comm(rank), memory, 8192, &window, NCCL_WIN_COLL_SYMMETRIC),
              ncclSuccess);
    EXPECT_NE(window, nullptr);
    EXPECT_EQ(ranks.nccl.commWindowDeregister(ranks.comm(rank), window), ncclSuccess);
    EXPECT_EQ(ranks.nccl.memFree(memory), ncclSuccess);
    std::uint64_t bytes = 0;
    EXPECT_EQ(ranks.nccl.commMemStats(ranks.comm(rank), 3, &bytes), ncclSuccess);
    const std::uint64_t before = bytes;
    sumOver(ranks, rank, ranks.comm(rank));
    EXPECT_EQ(ranks.nccl.commMemStats(ranks.comm(rank), 3, &bytes), ncclSuccess);
    EXPECT_GT(bytes, before);
    EXPECT_EQ(ranks.nccl.commFinalize(ranks.comm(rank)), ncclSuccess);
    EXPECT_EQ(ranks.nccl.commDestroy(ranks.comm(rank)), ncclSuccess);
  });
  EXPECT_EQ(ranks.cluster.live(), SimulatedCluster::Live());
  EXPECT_TRUE(ranks.cluster.violations().empty());
}

}  // namespace
}  // namespace farandole::testing
