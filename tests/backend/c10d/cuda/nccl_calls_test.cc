#include "backend/c10d/cuda/nccl_calls.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "backend/c10d/cuda_group.h"

namespace farandole::backend {
namespace {

using ::c10d::ReduceOp;

constexpr std::size_t kMostCallsOfGroup = 2048;

struct Call {
  std::string function;
  int peer;
};
using Group = std::vector<Call>;

// What was called of NCCL, for more ranks than can be simulated. A call outside of a group is one of its own.
struct Recorded {
  std::vector<Group> groups;
  bool isOpen = false;
  int failingEnd = -1;  // of a group, counted from 0

  ncclResult_t note(const char* function, int peer) {
    if (!isOpen) groups.emplace_back();
    groups.back().push_back({function, peer});
    return ncclSuccess;
  }
};
Recorded* recorded = nullptr;

transport::NcclApi recordingNccl() {
  transport::NcclApi api;
  api.groupStart = [] {
    recorded->groups.emplace_back();
    recorded->isOpen = true;
    return ncclSuccess;
  };
  api.groupEnd = [] {
    recorded->isOpen = false;
    const int ended = static_cast<int>(recorded->groups.size()) - 1;
    return ended == recorded->failingEnd ? ncclSystemError : ncclSuccess;
  };
  api.getErrorString = [](ncclResult_t) { return "failed"; };
  api.getLastError = [](ncclComm_t) { return ""; };
  api.send = [](const void*, std::size_t, ncclDataType_t, int peer, ncclComm_t, cudaStream_t) {
    return recorded->note("send", peer);
  };
  api.recv = [](void*, std::size_t, ncclDataType_t, int peer, ncclComm_t, cudaStream_t) {
    return recorded->note("recv", peer);
  };
  api.broadcast = [](const void*, void*, std::size_t, ncclDataType_t, int root, ncclComm_t, cudaStream_t) {
    return recorded->note("broadcast", root);
  };
  api.allReduce = [](const void*, void*, std::size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) {
    return recorded->note("allReduce", -1);
  };
  return api;
}

class NcclCallsTest : public ::testing::Test {
 protected:
  void SetUp() override { recorded = &recorded_; }
  void TearDown() override { recorded = nullptr; }

  // The groups of one rank.
  template <typename Calls>
  std::vector<Group> run(int rank, int size, const Calls& calls) {
    recorded_.groups.clear();
    const transport::NcclApi nccl = recordingNccl();
    transport::NcclGroup group(nccl);
    NcclCalls into(nccl, group, nullptr, nullptr, rank, size);
    calls(into);
    status_ = group.end();
    for (const Group& one : recorded_.groups) EXPECT_LE(one.size(), kMostCallsOfGroup);
    return recorded_.groups;
  }
  static std::size_t countOf(const std::vector<Group>& groups, const std::string& function) {
    std::size_t count = 0;
    for (const Group& group : groups) {
      count += std::ranges::count_if(group, [&](const Call& call) { return call.function == function; });
    }
    return count;
  }
  // The group in which this call is, which is made once.
  static int groupOf(const std::vector<Group>& groups, const std::string& function, int peer) {
    int found = -1;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      for (const Call& call : groups[i]) {
        if (call.function != function || call.peer != peer) continue;
        EXPECT_EQ(found, -1) << function << " with " << peer << " twice";
        found = static_cast<int>(i);
      }
    }
    return found;
  }

  Recorded recorded_;
  Status status_;
  std::byte byte_{};
};

TEST_F(NcclCallsTest, GatherAndScatterOfManyRanksAreCutAndTheRootsOwnMessageIsNot) {
  constexpr int kSize = 5000;
  for (const int root : {0, 511, 512, 2100, kSize - 1}) {
    SCOPED_TRACE(root);
    const Slice one{&byte_, 1};
    const std::vector<Slice> all(kSize, one);
    for (const bool isGather : {true, false}) {
      const auto calls = [&](NcclCalls& into) {
        isGather ? into.gather(root, one, all) : into.scatter(root, one, all);
      };
      const auto groups = run(root, kSize, calls);
      const char* const many = isGather ? "recv" : "send";
      const char* const single = isGather ? "send" : "recv";
      EXPECT_EQ(countOf(groups, many), kSize);
      EXPECT_EQ(countOf(groups, single), 1u);
      EXPECT_EQ(groupOf(groups, many, root), groupOf(groups, single, root));
      for (const int other : {0, 700, kSize - 1}) {
        if (other == root) continue;
        const auto theirs = run(other, kSize, calls);
        EXPECT_EQ(countOf(theirs, single), 1u);
        EXPECT_EQ(countOf(theirs, many), 0u);
      }
    }
  }
}

TEST_F(NcclCallsTest, AnExchangeOfManyRanksIsCutBetweenTheSameRoundsOnAll) {
  constexpr int kSize = 1500;
  const std::vector<Slice> all(kSize, {&byte_, 1});
  const auto exchange = [&](NcclCalls& into) { into.allToAll(all, all); };
  const auto mine = run(3, kSize, exchange);
  for (const int other : {0, 3, 600, 1200, kSize - 1}) {
    const auto theirs = run(other, kSize, exchange);
    EXPECT_EQ(groupOf(mine, "send", other), groupOf(theirs, "recv", 3));
    EXPECT_EQ(groupOf(mine, "recv", other), groupOf(theirs, "send", 3));
  }
}

TEST_F(NcclCallsTest, ManyCollectivesAreCutAfterTheSameOnAllRanks) {
  const ReduceOp sum = ReduceOp::SUM;
  const Reducing reducing = CudaGroup::reducing("all_reduce", sum, at::kByte);
  const auto reduceAll = [&](NcclCalls& into) {
    for (int i = 0; i < 5000; ++i) into.allReduce(reducing, {&byte_, 1});
  };
  const auto mine = run(0, 2, reduceAll);
  const auto theirs = run(1, 2, reduceAll);
  EXPECT_EQ(countOf(mine, "allReduce"), 5000u);
  ASSERT_EQ(mine.size(), theirs.size());
  for (std::size_t i = 0; i < mine.size(); ++i) EXPECT_EQ(mine[i].size(), theirs[i].size());
  // A list is a broadcast for each rank.
  constexpr int kSize = 3000;
  const std::vector<Slice> all(kSize, {&byte_, 1});
  const auto gathered = run(0, kSize, [&](NcclCalls& into) { into.allGather(all[0], all, Layout::kList); });
  EXPECT_EQ(countOf(gathered, "broadcast"), kSize);
}

TEST_F(NcclCallsTest, AfterAGroupThatFailedNothingIsCalledOutsideOfOne) {
  constexpr int kSize = 3000;
  const std::vector<Slice> all(kSize, {&byte_, 1});
  recorded_.failingEnd = 1;
  const auto groups = run(0, kSize, [&](NcclCalls& into) { into.allToAll(all, all); });
  EXPECT_EQ(groups.size(), 2u);
  EXPECT_FALSE(status_);
}

}  // namespace
}  // namespace farandole::backend
