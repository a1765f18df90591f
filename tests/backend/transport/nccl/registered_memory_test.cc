#include "backend/transport/nccl/registered_memory.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/backend/transport/nccl/device_groups.h"

namespace farandole::transport {
namespace {

using testing::DeviceGroups;
using testing::joined;
using namespace std::chrono_literals;

constexpr std::size_t kBytes = 8192;
constexpr MemoryPoolId kPool{0, 7};
constexpr ncclResult_t kErrors[] = {ncclUnhandledCudaError, ncclSystemError,  ncclInternalError,
                                    ncclInvalidArgument,    ncclInvalidUsage, ncclRemoteError};

// Connected groups, and segments of NCCL's memory for each rank, which go before the cluster.
struct Ranks {
  explicit Ranks(int size, std::uint64_t seed = 1) : groups(size, seed), segments(size) {
    groups.each([&](int rank) {
      EXPECT_TRUE(on(rank).connect());
      for (int i = 0; i < 2; ++i) {
        void* data = nullptr;
        EXPECT_EQ(groups.runtime.nccl.memAlloc(&data, kBytes), ncclSuccess);
        segments[rank].push_back({data, kBytes});
      }
    });
  }
  ~Ranks() {
    groups.end(Status::aborted("the test is over"));
    for (const auto& list : segments) {
      for (const MemorySegment& segment : list) {
        EXPECT_EQ(groups.runtime.nccl.memFree(segment.data), ncclSuccess);
      }
    }
    EXPECT_EQ(groups.cluster.live().allocations, 0);
    EXPECT_EQ(joined(groups.cluster.violations()), "");
  }
  GroupOnDevice& on(int rank) { return **groups.groups[rank]->on(rank); }
  // On all ranks; the errors.
  std::vector<Status> registerOnAll(bool isSymmetric) {
    std::vector<Status> statuses(groups.size());
    groups.each([&](int rank) { statuses[rank] = on(rank).registerMemory(kPool, segments[rank], isSymmetric); });
    return statuses;
  }
  int registrations() const { return groups.cluster.live().registrations; }

  DeviceGroups groups;
  std::vector<std::vector<MemorySegment>> segments;
};

TEST(RegisteredMemory, SegmentsOfAPoolAreRegisteredAndTakenBack) {
  for (const bool isSymmetric : {false, true}) {
    Ranks ranks(2);
    for (const Status& status : ranks.registerOnAll(isSymmetric)) EXPECT_TRUE(status) << status.toString();
    EXPECT_EQ(ranks.registrations(), 4);
    for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(ranks.on(rank).deregisterMemory(kPool));
    EXPECT_EQ(ranks.registrations(), 0);
    EXPECT_EQ(ranks.on(0).deregisterMemory(kPool).toString(),
              "memory pool (0, 7) is not registered; expected one that is");
  }
}

TEST(RegisteredMemory, WhatAPoolHasGotIsAddedAndWhatItHasLostIsTakenBack) {
  Ranks ranks(2);
  GroupOnDevice& on = ranks.on(0);
  const auto& segments = ranks.segments[0];
  (void)ranks.groups.runtime.cuda.setDevice(0);
  ASSERT_TRUE(on.registerMemory(kPool, {segments[0]}, false));
  ASSERT_TRUE(on.registerMemory(kPool, segments, false));
  EXPECT_EQ(ranks.groups.cluster.callCounts()["ncclCommRegister"], 2);
  EXPECT_EQ(ranks.registrations(), 2);
  ASSERT_TRUE(on.registerMemory(kPool, {segments[1]}, false));
  EXPECT_EQ(ranks.registrations(), 1);
  // A pool of its own.
  ASSERT_TRUE(on.registerMemory({0, 8}, {segments[0]}, false));
  EXPECT_EQ(ranks.registrations(), 2);
  ASSERT_TRUE(on.deregisterMemory(kPool));
  EXPECT_EQ(ranks.registrations(), 1);
}

TEST(RegisteredMemory, IsTakenBackBeforeTheCommunicatorIsClosed) {
  for (const bool isSymmetric : {false, true}) {
    Ranks ranks(2);
    (void)ranks.registerOnAll(isSymmetric);
    ranks.groups.close();
    EXPECT_EQ(ranks.registrations(), 0);
    const auto calls = ranks.groups.cluster.calls();
    const auto is = [](const char* name) { return [name](const auto& call) { return call.function == name; }; };
    const char* const back = isSymmetric ? "ncclCommWindowDeregister" : "ncclCommDeregister";
    EXPECT_EQ(std::ranges::count_if(calls, is(back)), 4);
    for (int device = 0; device < 2; ++device) {
      const auto isOf = [&](const char* name) {
        return [device, name](const auto& call) { return call.device == device && call.function == name; };
      };
      const auto end = std::ranges::find_if(calls, isOf("ncclCommFinalize"));
      ASSERT_NE(end, calls.end());
      EXPECT_EQ(std::count_if(calls.begin(), end, isOf(back)), 2);
    }
  }
}

TEST(RegisteredMemory, NeedsACommunicator) {
  DeviceGroups ranks(2, 1);
  const auto on = ranks.groups[0]->on(0);
  const Status status = (*on)->registerMemory(kPool, {}, false);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.toString().find("world is not connected"), std::string::npos) << status.toString();
}

TEST(RegisteredMemory, AnErrorOfAnyCallLeavesNothingRegistered) {
  for (const bool isSymmetric : {false, true}) {
    const std::string made = isSymmetric ? "ncclCommWindowRegister" : "ncclCommRegister";
    for (int nth = 1; nth <= 2; ++nth) {
      for (const ncclResult_t code : kErrors) {
        SCOPED_TRACE(made + " call " + std::to_string(nth) + " code " + std::to_string(code));
        Ranks ranks(2);
        // The same call of both, since the other rank would wait in a symmetric one.
        for (int rank = 0; rank < 2; ++rank) ranks.groups.cluster.failNccl(made, nth, code, rank);
        for (const Status& status : ranks.registerOnAll(isSymmetric)) {
          EXPECT_NE(status.toString().find(made), std::string::npos) << status.toString();
        }
        EXPECT_EQ(ranks.registrations(), 0);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(RegisteredMemory, AnErrorOfTakingBackIsToldAndTheGroupStillCloses) {
  for (const bool isSymmetric : {false, true}) {
    const std::string back = isSymmetric ? "ncclCommWindowDeregister" : "ncclCommDeregister";
    for (const ncclResult_t code : kErrors) {
      SCOPED_TRACE(back + " code " + std::to_string(code));
      Ranks ranks(2);
      (void)ranks.registerOnAll(isSymmetric);
      ranks.groups.cluster.failNccl(back, 1, code, 0);
      (void)ranks.groups.runtime.cuda.setDevice(0);
      const Status status = ranks.on(0).deregisterMemory(kPool);
      EXPECT_NE(status.toString().find(back), std::string::npos) << status.toString();
      ranks.groups.close();
      EXPECT_EQ(ranks.groups.cluster.live().communicators, 0);
      EXPECT_EQ(ranks.registrations(), 0);
    }
  }
}

TEST(RegisteredMemory, AnAbortComesThroughWhileARankWaitsForTheOthersWindow) {
  Ranks ranks(2);
  Status status;
  std::thread alone([&] {
    (void)ranks.groups.runtime.cuda.setDevice(0);
    status = ranks.on(0).registerMemory(kPool, ranks.segments[0], true);
  });
  EXPECT_TRUE(ranks.groups.cluster.waitUntilBlocked(1, 10s));
  ranks.groups.groups[0]->abort(Status::aborted("enough"));
  alone.join();
  EXPECT_FALSE(status);
  EXPECT_EQ(ranks.registrations(), 0);
}

TEST(RegisteredMemory, WhatAnOlderNcclLacksIsNamed) {
  DeviceGroups ranks(2, 1, 20s, false);
  ranks.each([&](int rank) {
    GroupOnDevice& on = **ranks.groups[rank]->on(rank);
    EXPECT_TRUE(on.connect());
    int memory = 0;
    const Status symmetric = on.registerMemory(kPool, {{&memory, sizeof memory}}, true);
    EXPECT_EQ(symmetric.toString(),
              "the loaded NCCL 2.27.3 has no function ncclCommWindowRegister, which newer ones have");
    NcclMemoryUse use;
    EXPECT_EQ(on.addMemoryUse(use).toString(),
              "the loaded NCCL 2.27.3 has no function ncclCommMemStats, which newer ones have");
    EXPECT_TRUE(on.registerMemory(kPool, {{&memory, sizeof memory}}, false));
  });
}

TEST(MemoryUse, OfAllCommunicatorsIsAddedUpAndErrorsAreTold) {
  DeviceGroups ranks(2, 1);
  std::vector<char> message(100);
  std::vector<char> received(100);
  NcclMemoryUse before;
  NcclMemoryUse after;
  GroupOnDevice& on = **ranks.groups[0]->on(0);
  ranks.each([&](int rank) { EXPECT_TRUE((*ranks.groups[rank]->on(rank))->connect()); });
  EXPECT_TRUE(on.addMemoryUse(before));
  EXPECT_GT(before.total, 0);
  EXPECT_EQ(before.total, before.suspendable + before.persistent);
  ranks.each([&](int rank) {
    const DeviceGroups::Message one{rank == 0, 1 - rank, rank == 0 ? message.data() : received.data(), 100};
    EXPECT_TRUE(ranks.post(rank, {one})[0]->awaitEnd());
  });
  EXPECT_TRUE(on.addMemoryUse(after));
  EXPECT_GT(after.total, before.total);
  EXPECT_FALSE(after.isSuspended);
  for (const ncclResult_t code : kErrors) {
    ranks.cluster.failNccl("ncclCommMemStats", 3, code);
    EXPECT_NE(on.addMemoryUse(after).toString().find("ncclCommMemStats of world device 0"), std::string::npos);
  }
  ranks.close();
  NcclMemoryUse none;
  EXPECT_TRUE(on.addMemoryUse(none));
  EXPECT_EQ(none.total, 0);
}

}  // namespace
}  // namespace farandole::transport
