// A group that takes over what a larger one has connected (DeviceGroup::connectFrom).
#include <gtest/gtest.h>

#include "tests/backend/transport/nccl/device_groups.h"

namespace farandole::transport {
namespace {

using testing::DeviceGroups;
using testing::joined;
using testing::OperationPtr;
using testing::TestDeviceOperation;
using testing::TestMeeting;
using namespace std::chrono_literals;

GroupOnDevice::Calls sumOf(const NcclApi& nccl, int& value) {
  return [&nccl, &value](NcclGroup& group, ncclComm_t communicator, cudaStream_t stream) {
    group.add(nccl.allReduce(&value, &value, 1, ncclInt32, ncclSum, communicator, stream), "ncclAllReduce");
  };
}

// Three ranks that are connected, and a group without rank 1 that is not.
class ShrunkGroup : public ::testing::Test {
 protected:
  static constexpr int kLeft[] = {0, 2};

  void begin(bool hasNewerFunctions = true) {
    parent_ = std::make_unique<DeviceGroups>(3, 1, 20s, hasNewerFunctions);
    makeChild("child");
    parent_->each([&](int rank) { EXPECT_EQ(sum(*parent_, rank), 6); });
  }
  void makeChild(const std::string& name) {
    child_.clear();
    meeting_ = std::make_shared<TestMeeting>(parent_->runtime.nccl);
    const auto talks = testing::TestTalk::all(2, 1);
    for (int rank = 0; rank < 2; ++rank) {
      watches_.push_back(std::make_shared<DeviceWatch>(parent_->runtime.cuda));
      child_.push_back(std::make_shared<DeviceGroup>(
          DeviceGroupSetup{&parent_->runtime, watches_.back(), meeting_, talks[rank], name, rank, 2, 2, 20s},
          [meeting = meeting_] { return meeting->health(); },
          [meeting = meeting_](const Status& why, bool) { meeting->end(why); }));
    }
  }
  void SetUp() override { begin(); }
  void TearDown() override {
    endChild();
    parent_->end(Status::aborted("the test is over"));
    const auto deadline = DeviceClock::now() + 20s;
    while (meeting_.use_count() > 1 && DeviceClock::now() < deadline) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(meeting_.use_count(), 1) << "a thread does not end";
    EXPECT_EQ(joined(parent_->cluster.violations()), "");
    parent_.reset();
  }
  void endChild() {
    meeting_->end(Status::aborted("the test is over"));
    for (const auto& group : child_) group->abort(Status::aborted("the test is over"));
    child_.clear();
    watches_.clear();
  }

  int sum(DeviceGroups& ranks, int rank) {
    int value = rank + 1;
    EXPECT_TRUE(ranks.run(rank, false, sumOf(ranks.runtime.nccl, value))->awaitEnd());
    return value;
  }
  // Rank `index` of the child.
  Status connectChild(int index) {
    const int rank = kLeft[index];
    (void)parent_->runtime.cuda.setDevice(rank);
    return child_[index]->connectFrom(*parent_->groups[rank], {0}, {1});
  }
  int sumOfChild(int index) {
    const int rank = kLeft[index];
    int value = rank + 1;
    (void)parent_->runtime.cuda.setDevice(rank);
    const auto operation = std::make_shared<TestDeviceOperation>("child");
    const auto on = child_[index]->on(rank);
    if (!on) return -1;
    const Status launched = (*on)->run(parent_->streams[rank], false, operation, sumOf(parent_->runtime.nccl, value));
    EXPECT_TRUE(launched) << launched.toString();
    EXPECT_TRUE(!launched || operation->awaitEnd());
    return value;
  }
  template <typename Body>
  void eachOfChild(const Body& body) {
    std::thread other([&] { body(1); });
    body(0);
    other.join();
  }
  // Both connect, and add up.
  void connectAndCheck() {
    eachOfChild([&](int index) {
      const Status status = connectChild(index);
      EXPECT_TRUE(status) << status.toString();
      EXPECT_EQ(sumOfChild(index), 4);
    });
  }
  int count(const std::string& function) { return parent_->cluster.callCounts()[function]; }

  std::unique_ptr<DeviceGroups> parent_;
  std::shared_ptr<TestMeeting> meeting_;
  std::vector<std::shared_ptr<DeviceWatch>> watches_;
  std::vector<std::shared_ptr<DeviceGroup>> child_;
};

TEST_F(ShrunkGroup, TakesOverTheCommunicatorAndBothGoOn) {
  EXPECT_EQ(parent_->groups[0]->connectedDevices(), std::vector<int>{0});
  connectAndCheck();
  EXPECT_EQ(count("ncclCommShrink"), 2);
  EXPECT_EQ(count("ncclCommInitRankConfig"), 3);
  parent_->each([&](int rank) { EXPECT_EQ(sum(*parent_, rank), 6); });
  parent_->close();
  eachOfChild([&](int index) { EXPECT_EQ(sumOfChild(index), 4); });
  eachOfChild([&](int index) { child_[index]->close(10s); });
  EXPECT_EQ(parent_->cluster.live().communicators, 0);
}

TEST_F(ShrunkGroup, OfOneParentOnlyTheFirstTakesItsCommunicatorOver) {
  connectAndCheck();
  const auto first = child_;
  const auto firstMeeting = meeting_;
  makeChild("second child");
  connectAndCheck();
  EXPECT_EQ(count("ncclCommShrink"), 2);
  EXPECT_EQ(count("ncclCommInitRankConfig"), 5);
  for (const auto& group : first) group->abort(Status::aborted("the test is over"));
}

TEST_F(ShrunkGroup, IsMadeFromNothingWhereTheParentIsBusyOnOneRank) {
  parent_->cluster.hold(parent_->streams[2]);
  std::vector<OperationPtr> pending(3);
  std::vector<int> values(3, 1);
  parent_->each(
      [&](int rank) { pending[rank] = parent_->run(rank, false, sumOf(parent_->runtime.nccl, values[rank])); });
  eachOfChild([&](int index) { EXPECT_TRUE(connectChild(index)); });
  EXPECT_EQ(count("ncclCommShrink"), 0);
  EXPECT_EQ(count("ncclCommInitRankConfig"), 5);
  parent_->cluster.release(parent_->streams[2]);
  for (const auto& operation : pending) EXPECT_TRUE(operation->awaitEnd());
  eachOfChild([&](int index) { EXPECT_EQ(sumOfChild(index), 4); });
  EXPECT_EQ(values, (std::vector<int>{3, 3, 3}));
}

TEST_F(ShrunkGroup, IsMadeFromNothingWhereTheParentWasAbortedOrClosedOnOneRank) {
  for (const bool isClosed : {false, true}) {
    if (isClosed) {
      TearDown();
      begin();
    }
    if (isClosed) {
      parent_->groups[2]->close(100ms);
    } else {
      parent_->groups[2]->abort(Status::aborted("enough"));
    }
    EXPECT_TRUE(parent_->groups[2]->connectedDevices().empty());
    connectAndCheck();
    EXPECT_EQ(count("ncclCommShrink"), 0);
  }
}

TEST_F(ShrunkGroup, IsMadeFromNothingWhereACallOfTheParentIsStuck) {
  // Another kind of call, for which it connects anew, and which the other ranks never make.
  parent_->cluster.setConnectsBlock(true);
  std::thread stuck([&] {
    (void)parent_->runtime.cuda.setDevice(2);
    int value = 0;
    const auto send = [&](NcclGroup& group, ncclComm_t communicator, cudaStream_t stream) {
      group.add(parent_->runtime.nccl.send(&value, 4, ncclUint8, 0, communicator, stream), "ncclSend");
    };
    EXPECT_FALSE(parent_->run(2, false, send)->status());
  });
  EXPECT_TRUE(parent_->cluster.waitUntilBlocked(1, 10s));
  eachOfChild([&](int index) { EXPECT_TRUE(connectChild(index)); });
  EXPECT_EQ(count("ncclCommShrink"), 0);
  eachOfChild([&](int index) { EXPECT_EQ(sumOfChild(index), 4); });
  parent_->groups[2]->abort(Status::aborted("enough"));
  stuck.join();
}

TEST_F(ShrunkGroup, IsMadeFromNothingByAnOlderNccl) {
  TearDown();
  begin(false);
  EXPECT_TRUE(parent_->groups[0]->connectedDevices().empty());
  connectAndCheck();
}

TEST_F(ShrunkGroup, AnExcludedRankMayBeDead) {
  parent_->kill(1);
  connectAndCheck();
}

TEST_F(ShrunkGroup, AfterADeathAndTheEndOfTheParentItIsMadeFromNothingWithoutTheDead) {
  parent_->kill(1);
  for (const int rank : kLeft) parent_->groups[rank]->abort(Status::aborted("shrink with the flag that aborts"));
  connectAndCheck();
  EXPECT_EQ(count("ncclCommShrink"), 0);
}

TEST_F(ShrunkGroup, ARankThatDoesNotComeIsATimeoutOrTheEndOfTheGroupNotAHang) {
  std::thread alone([&] {
    const Status status = connectChild(0);
    EXPECT_NE(status.toString().find("rank 1 failed"), std::string::npos) << status.toString();
  });
  std::this_thread::sleep_for(50ms);
  // The parent is not used by others meanwhile, and not stuck for ever.
  meeting_->end(Status(StatusCode::kPeerFailed, "rank 1 failed"));
  alone.join();
  parent_->each([&](int rank) { EXPECT_EQ(sum(*parent_, rank), 6); });
}

TEST_F(ShrunkGroup, ARankThatDiesWhileNcclShrinksLeavesNothingStuck) {
  // It agrees, and its call fails as if it had died in it.
  parent_->cluster.failNccl("ncclCommShrink", 1, ncclSystemError, 2);
  std::thread dying([&] { EXPECT_FALSE(connectChild(1)); });
  const Status status = connectChild(0);
  EXPECT_FALSE(status);
  dying.join();
  const auto start = DeviceClock::now();
  parent_->groups[0]->abort(Status::aborted("the rank is gone"));
  EXPECT_LT(DeviceClock::now() - start, 5s);
}

TEST_F(ShrunkGroup, AnErrorOfShrinkingEndsTheGroupAndLeavesTheParent) {
  for (const ncclResult_t code : {ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument,
                                  ncclInvalidUsage, ncclRemoteError}) {
    SCOPED_TRACE(code);
    for (int rank : kLeft) parent_->cluster.failNccl("ncclCommShrink", 1, code, rank);
    eachOfChild([&](int index) {
      const Status status = connectChild(index);
      EXPECT_NE(status.toString().find("ncclCommShrink of world device 0 to child device 0"), std::string::npos)
          << status.toString();
    });
    parent_->each([&](int rank) { EXPECT_EQ(sum(*parent_, rank), 6); });
    EXPECT_EQ(parent_->cluster.live().communicators, 3);
    TearDown();
    begin();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace farandole::transport
