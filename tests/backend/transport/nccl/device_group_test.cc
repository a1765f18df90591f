#include "backend/transport/nccl/device_group.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <set>

#include "tests/backend/transport/nccl/device_groups.h"

namespace farandole::transport {
namespace {

using testing::DeviceGroups;
using testing::joined;
using testing::OperationPtr;
using testing::TestDeviceOperation;
using namespace std::chrono_literals;

constexpr std::size_t kCount = 100;

// In place, of ints.
TEST(DeviceGroup, CollectivesComeAfterTheCurrentStreamAndWaitingStreamsAfterThem) {
  const std::uint64_t first = std::random_device{}() % 1'000'000;
  std::cerr << "seed " << first << '\n';
  for (std::uint64_t seed = first; seed < first + 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    DeviceGroups ranks(3, seed);
    ranks.each([&](int rank) {
      std::vector<int> data(kCount);
      std::vector<int> copy(kCount);
      for (int round = 0; round < 20; ++round) {
        // The same on all ranks.
        const bool inOrder = (seed * 7 + round * 13) % 5 < 2;
        ranks.cluster.enqueue(ranks.streams[rank],
                              [&data, rank, round] { std::iota(data.begin(), data.end(), rank + round); });
        const OperationPtr operation = ranks.run(rank, inOrder, sumOf(ranks, data));
        ranks.wait(rank, operation);
        EXPECT_FALSE(operation->hasBuffers());
        ranks.cluster.enqueue(ranks.streams[rank], [&] { copy = data; });
        EXPECT_TRUE(ranks.cluster.synchronize(ranks.streams[rank], 20s));
        std::vector<int> expected(kCount);
        std::iota(expected.begin(), expected.end(), round);
        for (int& value : expected) value = 3 * value + 3;
        EXPECT_EQ(copy, expected);
        EXPECT_TRUE(operation->isDone());
      }
    });
    ranks.close();
    EXPECT_EQ(joined(ranks.cluster.violations()), "");
    EXPECT_EQ(ranks.cluster.live().communicators, 0);
    if (HasFailure()) return;
  }
}

TEST(DeviceGroup, WhatTheDeviceHasRunIsDoneAlsoWhileItIsBeingEnded) {
  DeviceGroups ranks(2, 1);
  std::vector<std::vector<int>> data(2, std::vector<int>(kCount, 1));
  ranks.each([&](int rank) {
    const auto operation = ranks.run(rank, false, sumOf(ranks, data[rank]));
    ASSERT_TRUE(operation->awaitEnd());
    EXPECT_TRUE(operation->status()) << operation->status().toString();
    EXPECT_TRUE(operation->wasDoneWhileEnding());
  });
  // Without a launch there is nothing of the device's to look at.
  TestDeviceOperation queued("queued");
  queued.finish(Status(StatusCode::kTimeout, "late"));
  EXPECT_FALSE(queued.wasDoneWhileEnding());
  EXPECT_TRUE(queued.isDone());
}

TEST(DeviceGroup, TheHostDoesNotWaitForTheDevice) {
  DeviceGroups ranks(2, 1);
  std::vector<std::vector<int>> data(2, std::vector<int>(kCount, 1));
  ranks.each([&](int rank) { (void)ranks.run(rank, false, sumOf(ranks, data[rank]))->awaitEnd(); });
  for (cudaStream_t stream : ranks.streams) ranks.cluster.hold(stream);
  std::vector<OperationPtr> operations(2);
  ranks.each([&](int rank) { operations[rank] = ranks.run(rank, false, sumOf(ranks, data[rank])); });
  for (int rank = 0; rank < 2; ++rank) {
    ranks.wait(rank, operations[rank]);
    EXPECT_FALSE(operations[rank]->isDone());
    ranks.cluster.release(ranks.streams[rank]);
  }
  for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(ranks.cluster.synchronize(ranks.streams[rank], 20s));
  EXPECT_EQ(data[0], std::vector<int>(kCount, 4));
}

TEST(DeviceGroup, OnTheCurrentStreamNoEventIsWaitedFor) {
  DeviceGroups ranks(2, 1);
  std::vector<std::vector<int>> data(2, std::vector<int>(kCount, 1));
  ranks.each([&](int rank) {
    const auto operation = ranks.run(rank, true, sumOf(ranks, data[rank]));
    ranks.wait(rank, operation);
    EXPECT_TRUE(operation->awaitEnd());
  });
  EXPECT_EQ(ranks.cluster.callCounts()["cudaStreamWaitEvent"], 0);
}

TEST(DeviceGroup, AnOperationThatIsLateEndsTheGroupAndIsNamed) {
  DeviceGroups ranks(2, 1);
  std::vector<std::vector<int>> data(2, std::vector<int>(kCount, 1));
  ranks.each([&](int rank) { (void)ranks.run(rank, false, sumOf(ranks, data[rank]))->awaitEnd(); });
  const auto late = ranks.run(0, false, sumOf(ranks, data[0]), "all_reduce 1", 30ms);
  const auto behind = ranks.run(0, false, sumOf(ranks, data[0]), "all_reduce 2");
  ASSERT_TRUE(late->awaitEnd());
  ASSERT_TRUE(behind->awaitEnd());
  EXPECT_EQ(late->status().toString(), "all_reduce 1: it did not end within its timeout");
  EXPECT_EQ(behind->status().code(), StatusCode::kTimeout);
  // The stream is free again, and the other rank knows.
  EXPECT_TRUE(ranks.cluster.synchronize(ranks.streams[0], 20s));
  const auto other = ranks.run(1, false, sumOf(ranks, data[1]));
  ASSERT_TRUE(other->awaitEnd());
  EXPECT_NE(other->status().toString().find("rank 0 ended the group: all_reduce 1"), std::string::npos)
      << other->status().toString();
}

TEST(DeviceGroup, ARankThatDiesEndsTheGroupOnTheOthers) {
  DeviceGroups ranks(3, 1);
  std::vector<std::vector<int>> data(3, std::vector<int>(kCount, 1));
  ranks.each([&](int rank) { (void)ranks.run(rank, false, sumOf(ranks, data[rank]))->awaitEnd(); });
  ranks.kill(2);
  const auto start = DeviceClock::now();
  for (int rank = 0; rank < 2; ++rank) {
    const auto operation = ranks.run(rank, false, sumOf(ranks, data[rank]));
    ASSERT_TRUE(operation->awaitEnd());
    EXPECT_FALSE(operation->status());
  }
  EXPECT_LT(DeviceClock::now() - start, 5s);
}

TEST(DeviceGroup, WhatTheRanksKnowComesBeforeWhatNcclSays) {
  DeviceGroups ranks(2, 1);
  std::vector<std::vector<int>> data(2, std::vector<int>(kCount, 1));
  ranks.each([&](int rank) { (void)ranks.run(rank, false, sumOf(ranks, data[rank]))->awaitEnd(); });
  const auto operation = ranks.run(0, false, sumOf(ranks, data[0]));
  ranks.meeting->end(Status(StatusCode::kPeerFailed, "rank 1 (host a, pid 7) failed: its process died"));
  ASSERT_TRUE(operation->awaitEnd());
  EXPECT_EQ(operation->status().toString(), "rank 1 (host a, pid 7) failed: its process died");
  // It is told once, also to those who write down what has happened.
  const auto deadline = DeviceClock::now() + 20s;
  while (ranks.meeting->numToldByRanks == 0 && DeviceClock::now() < deadline) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(ranks.meeting->numToldByRanks, 1);
  EXPECT_EQ(ranks.meeting->numFailed, 0);
}

TEST(DeviceGroup, ClosingDoesNotWaitForEverForAPeer) {
  DeviceGroups ranks(2, 1);
  std::vector<std::vector<int>> data(2, std::vector<int>(kCount, 1));
  ranks.each([&](int rank) { (void)ranks.run(rank, false, sumOf(ranks, data[rank]))->awaitEnd(); });
  const auto alone = ranks.run(0, false, sumOf(ranks, data[0]));
  const auto start = DeviceClock::now();
  ranks.groups[0]->close(100ms);
  EXPECT_LT(DeviceClock::now() - start, 5s);
  EXPECT_TRUE(alone->hasEnded());
  EXPECT_EQ(alone->status().code(), StatusCode::kAborted);
}

// NCCL's abort of one communicator waits for the kernels of all.
TEST(DeviceGroup, WhatWaitsForOnePeerInSeveralCommunicatorsEndsTogether) {
  for (const bool newer : {true, false}) {
    DeviceGroups ranks(2, 1, 20s, newer);
    std::vector<std::vector<int>> data(6, std::vector<int>(kCount, 1));
    const auto runAll = [&](int rank) {
      std::vector<OperationPtr> operations = ranks.post(rank, {{true, 1 - rank, data[rank].data(), 4 * kCount},
                                                               {false, 1 - rank, data[2 + rank].data(), 4 * kCount}});
      operations.push_back(ranks.run(rank, false, sumOf(ranks, data[4 + rank])));
      return operations;
    };
    ranks.each([&](int rank) {
      for (const auto& operation : runAll(rank)) ASSERT_TRUE(operation->awaitEnd());
    });
    const std::vector<OperationPtr> alone = runAll(0);
    for (const auto& operation : alone) operation->awaitLaunch();
    std::this_thread::sleep_for(50ms);  // they run
    const auto start = DeviceClock::now();
    ranks.groups[0]->abort(Status::aborted("enough"));
    for (const auto& operation : alone) EXPECT_TRUE(operation->awaitEnd(1s));
    EXPECT_TRUE(ranks.cluster.synchronize(ranks.streams[0], 5s));
    while (ranks.cluster.live().communicators > 3 && DeviceClock::now() < start + 10s) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(ranks.cluster.live().communicators, 3) << "rank 1's";
  }
}

TEST(DeviceGroup, AbortComesThroughWhileACallIsStuck) {
  for (const bool newer : {true, false}) {
    DeviceGroups ranks(2, 1, 20s, newer);
    ranks.cluster.setConnectsBlock(true);
    std::vector<int> data(kCount, 1);
    // Rank 1 makes the communicator, and never calls the collective.
    std::thread stuck([&] {
      (void)ranks.runtime.cuda.setDevice(0);
      EXPECT_FALSE(ranks.run(0, false, sumOf(ranks, data))->status());
    });
    std::thread other([&] {
      (void)ranks.runtime.cuda.setDevice(1);
      const auto on = ranks.groups[1]->on(1);
      EXPECT_TRUE((*on)->connect());
    });
    other.join();
    EXPECT_TRUE(ranks.cluster.waitUntilBlocked(1, 10s));
    ranks.groups[0]->abort(Status::aborted("enough"));
    stuck.join();
  }
}

TEST(DeviceGroup, ACallThatIsStuckIsLateToo) {
  for (const bool newer : {true, false}) {
    for (const bool isCaptured : {false, true}) {
      DeviceGroups ranks(2, 1, 20s, newer);
      ranks.cluster.setConnectsBlock(true);
      ranks.each([&](int rank) {
        const auto on = ranks.groups[rank]->on(rank);
        EXPECT_TRUE((*on)->connect());
      });
      // Rank 1 never calls the collective.
      std::vector<int> data(kCount, 1);
      (void)ranks.runtime.cuda.setDevice(0);
      if (isCaptured) ranks.cluster.beginCapture(ranks.streams[0]);
      const auto stuck = ranks.run(0, false, sumOf(ranks, data), "all_reduce 1", 50ms);
      if (isCaptured) ranks.cluster.endCapture(ranks.streams[0]);
      EXPECT_EQ(stuck->status().toString(), "all_reduce 1: it did not end within its timeout");
    }
  }
}

TEST(DeviceGroup, ARankThatMeetsAndThenStandsStillIsNotWaitedForWithoutEnd) {
  DeviceGroups ranks(2, 1, 1s);
  std::vector<int> data(kCount, 1);
  std::thread other([&] { EXPECT_TRUE(ranks.meeting->meet("world device 0", 1, 2, DeviceClock::now() + 20s)); });
  const auto waiting = ranks.run(0, false, sumOf(ranks, data));
  EXPECT_EQ(waiting->status().toString(), "world: NCCL has not connected its ranks within 1000 ms");
  other.join();
  ranks.kill(1);  // else NCCL waits for it to the end
}

// A bit of everything, to the end; returns whether all of it went well.
bool runEverything(DeviceGroups& ranks) {
  std::atomic<bool> isWell{true};
  std::vector<std::vector<int>> data(2, std::vector<int>(kCount, 1));
  std::vector<std::vector<int>> messages(4, std::vector<int>(kCount, 1));
  ranks.each([&](int rank) {
    std::vector<OperationPtr> operations;
    for (const bool inOrder : {false, true}) operations.push_back(ranks.run(rank, inOrder, sumOf(ranks, data[rank])));
    const auto posted = ranks.post(rank, {{true, 1 - rank, messages[rank].data(), 4 * kCount},
                                          {false, 1 - rank, messages[2 + rank].data(), 4 * kCount}});
    operations.insert(operations.end(), posted.begin(), posted.end());
    for (const auto& operation : operations) {
      operation->awaitLaunch();
      const bool hasEnded = operation->awaitEnd(10s);
      EXPECT_TRUE(hasEnded) << operation->describe() << " of rank " << rank;
      if (!hasEnded || !operation->status()) isWell = false;
    }
  });
  if (isWell) ranks.close(5s);
  for (const auto& group : ranks.groups) {
    if (const Status status = group->status(); status.code() != StatusCode::kAborted) isWell = false;
  }
  return isWell;
}

TEST(DeviceGroup, AnErrorOfAnyCallEndsEveryOperationAndLeavesNothingBehind) {
  std::map<std::string, int> counts;
  {
    DeviceGroups ranks(2, 1);
    ASSERT_TRUE(runEverything(ranks));
    counts = ranks.cluster.callCounts();
  }
  // What is asked all the time is counted by chance, and what ends things has nobody to tell.
  const std::set<std::string> ending{"ncclCommAbort",      "ncclCommDestroy",  "ncclCommFinalize",
                                     "ncclGetErrorString", "ncclGetLastError", "ncclCommGetAsyncError",
                                     "ncclCommRevoke"};
  const std::vector<ncclResult_t> codes{ncclUnhandledCudaError, ncclSystemError,  ncclInternalError,
                                        ncclInvalidArgument,    ncclInvalidUsage, ncclRemoteError};
  int runs = 0;
  for (const auto& [function, count] : counts) {
    if (!function.starts_with("nccl") || ending.contains(function)) continue;
    for (int nth = 1; nth <= count; ++nth) {
      for (const ncclResult_t code : codes) {
        SCOPED_TRACE(function + " call " + std::to_string(nth) + " code " + std::to_string(code));
        DeviceGroups ranks(2, static_cast<std::uint64_t>(++runs), 2s);
        ranks.cluster.failNccl(function, nth, code);
        EXPECT_FALSE(runEverything(ranks));
        bool isNamed = false;
        for (const auto& group : ranks.groups) {
          if (group->status().toString().find(function) != std::string::npos) isNamed = true;
        }
        EXPECT_TRUE(isNamed) << ranks.groups[0]->status().toString() << "; " << ranks.groups[1]->status().toString();
        ranks.end(Status::aborted("the run is over"));
        EXPECT_EQ(joined(ranks.cluster.violations()), "");
        // The other rank waits in NCCL, where nothing but this one's end reaches it.
        if (function == "ncclCommInitRankConfig") {
          for (int rank = 0; rank < 2; ++rank) ranks.kill(rank);
        }
        if (HasFailure()) return;
      }
    }
  }
  std::cerr << runs << " runs\n";
  EXPECT_GT(runs, 100);
}

TEST(DeviceGroup, AnErrorThatNcclFindsLaterEndsTheGroup) {
  DeviceGroups ranks(2, 1);
  std::vector<std::vector<int>> data(2, std::vector<int>(kCount, 1));
  ranks.each([&](int rank) { (void)ranks.run(rank, false, sumOf(ranks, data[rank]))->awaitEnd(); });
  const auto operation = ranks.run(0, false, sumOf(ranks, data[0]));
  ranks.cluster.failAsync(0, ncclRemoteError);
  ASSERT_TRUE(operation->awaitEnd());
  EXPECT_EQ(operation->status().code(), StatusCode::kPeerFailed) << operation->status().toString();
}

TEST(DeviceGroup, AnErrorOfCudaEndsEveryOperationToo) {
  std::map<std::string, int> counts;
  {
    DeviceGroups ranks(2, 1);
    ASSERT_TRUE(runEverything(ranks));
    counts = ranks.cluster.callCounts();
  }
  int runs = 0;
  for (const std::string function : {"cudaStreamCreateWithPriority", "cudaEventCreateWithFlags", "cudaEventRecord",
                                     "cudaStreamWaitEvent", "cudaEventQuery", "cudaStreamIsCapturing",
                                     "cudaDeviceGetStreamPriorityRange", "cudaGetDevice", "cudaSetDevice"}) {
    // Of what is called all the time, the first calls.
    for (int nth = 1; nth <= std::min(counts[function], 12); ++nth) {
      SCOPED_TRACE(function + " call " + std::to_string(nth));
      DeviceGroups ranks(2, static_cast<std::uint64_t>(++runs), 2s);
      ranks.cluster.failCuda(function, nth, cudaErrorUnknown);
      (void)runEverything(ranks);
      ranks.end(Status::aborted("the run is over"));
      // As above; at the wrong moment the other rank waits in NCCL.
      for (int rank = 0; rank < 2; ++rank) ranks.kill(rank);
      if (HasFailure()) return;
    }
  }
  std::cerr << runs << " runs\n";
}

}  // namespace
}  // namespace farandole::transport
