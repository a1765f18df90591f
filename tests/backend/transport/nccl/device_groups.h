#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/transport/nccl/device_group.h"
#include "tests/backend/transport/nccl/simulator/simulated_cluster.h"
#include "tests/backend/transport/nccl/test_talk.h"

namespace farandole::transport::testing {

using namespace std::chrono_literals;
using farandole::testing::SimulatedCluster;

// An operation without tensors, which remembers how it ended.
class TestDeviceOperation final : public DeviceOperation {
 public:
  explicit TestDeviceOperation(std::string name, std::chrono::milliseconds timeout = 60s)
      : DeviceOperation(DeviceClock::now() + timeout), name_(std::move(name)) {}
  std::string describe() const override { return name_; }
  bool hasBuffers() const { return hasBuffers_; }
  // What a thread sees that looks while another one ends it.
  bool wasDoneWhileEnding() const { return wasDoneWhileEnding_; }
  bool awaitEnd(std::chrono::milliseconds limit = 20s) const {
    for (const auto deadline = DeviceClock::now() + limit; !hasEnded(); std::this_thread::sleep_for(1ms)) {
      if (DeviceClock::now() > deadline) return false;
    }
    return true;
  }

 protected:
  void ending(const Status&) override { wasDoneWhileEnding_ = isDone(); }
  void dropBuffers() override { hasBuffers_ = false; }

 private:
  const std::string name_;
  std::atomic<bool> wasDoneWhileEnding_{false};
  std::atomic<bool> hasBuffers_{true};
};
using OperationPtr = std::shared_ptr<TestDeviceOperation>;

// What a store is to processes; and how ranks hear that the group is over.
class TestMeeting final : public CommunicatorMeeting {
 public:
  explicit TestMeeting(const NcclApi& nccl) : nccl_(nccl) {}

  // How groups have ended: each tells once.
  std::atomic<int> numFailed{0};
  std::atomic<int> numToldByRanks{0};

  Result<ncclUniqueId> meet(const std::string& name, int rank, int size, DeviceClock::time_point deadline) override {
    std::unique_lock lock(mutex_);
    if (!over_) return over_;
    Place& place = places_[name];
    if (rank == 0) FARANDOLE_RETURN_IF_ERROR(nccl_.check(nccl_.getUniqueId(&place.id), "ncclGetUniqueId"));
    ++place.here;
    changed_.notify_all();
    (void)changed_.wait_until(lock, deadline, [&] { return place.here >= size || !over_; });
    if (place.here >= size) return place.id;
    if (!over_) return over_;
    return Status::timeout(std::to_string(place.here) + " of " + std::to_string(size) + " ranks have come");
  }

  Result<bool> agree(const std::string& name, int size, bool mine, DeviceClock::time_point deadline) override {
    std::unique_lock lock(mutex_);
    Place& place = places_[name + "/vote"];
    ++place.here;
    place.saidYes += mine ? 1 : 0;
    changed_.notify_all();
    (void)changed_.wait_until(lock, deadline, [&] { return place.here >= size || !over_; });
    if (place.here >= size) return place.saidYes == size;
    if (!over_) return over_;
    return Status::timeout(std::to_string(place.here) + " of " + std::to_string(size) + " ranks have come");
  }

  void end(const Status& why) {
    std::lock_guard lock(mutex_);
    if (over_) over_ = why;
    changed_.notify_all();
  }
  Status health() {
    std::lock_guard lock(mutex_);
    return over_;
  }

 private:
  struct Place {
    ncclUniqueId id;
    int here = 0;
    int saidYes = 0;
  };
  const NcclApi& nccl_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Place> places_;
  Status over_;
};

// A group whose ranks are threads of the test, each with a device of the same number and a stream of the user's.
class DeviceGroups {
 public:
  DeviceGroups(int size, std::uint64_t seed, std::chrono::milliseconds timeout = 20s, bool hasNewerFunctions = true)
      : cluster(size, seed),
        runtime{cluster.cuda(), ncclOf(cluster, hasNewerFunctions)},
        meeting(std::make_shared<TestMeeting>(runtime.nccl)),
        talks_(TestTalk::all(size, seed)) {
    for (int rank = 0; rank < size; ++rank) {
      streams.push_back(cluster.userStream(rank));
      watches_.push_back(std::make_shared<DeviceWatch>(runtime.cuda));
      groups.push_back(std::make_shared<DeviceGroup>(
          DeviceGroupSetup{&runtime, watches_.back(), meeting, talks_[rank], "world", rank, size, 2, timeout},
          [meeting = meeting] { return meeting->health(); },
          [meeting = meeting, rank](const Status& why, bool ranksKnow) {
            ++(ranksKnow ? meeting->numToldByRanks : meeting->numFailed);
            meeting->end(why.wrap("rank " + std::to_string(rank) + " ended the group"));
          }));
    }
  }
  ~DeviceGroups() {
    end(Status::aborted("the test is over"));
    groups.clear();
    watches_.clear();
    Aborts::waitForAll(20s);  // they use the runtime
    // Threads that still connect hold what they connect, and need the cluster, to their end. The meeting is the last
    // that they let go of.
    const auto deadline = DeviceClock::now() + 20s;
    const auto isLeft = [&] {
      return meeting.use_count() > 1 || (!hasDead_ && cluster.live() != SimulatedCluster::Live{});
    };
    while (isLeft() && DeviceClock::now() < deadline) std::this_thread::sleep_for(1ms);
    EXPECT_FALSE(isLeft()) << "something of the group is left, or a thread does not end";
  }
  void end(const Status& why) {
    meeting->end(why);
    for (const auto& group : groups) group->abort(why);
  }
  void kill(int rank) {
    hasDead_ = true;
    cluster.killRank(rank);
  }
  // All at once, as destroy_process_group does.
  void close(std::chrono::milliseconds limit = 10s) {
    each([&](int rank) { groups[rank]->close(limit); });
  }

  int size() const { return static_cast<int>(groups.size()); }
  // Runs `body` for each rank on a thread of its own, to the end.
  template <typename Body>
  void each(const Body& body) {
    std::vector<std::thread> threads;
    threads.reserve(groups.size());
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([&, rank] {
        (void)runtime.cuda.setDevice(rank);
        body(rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // As c10d's layer does it: what cannot be issued ends the group, and the operation.
  OperationPtr run(int rank, bool inOrder, const GroupOnDevice::Calls& calls, const std::string& name = "collective",
                   std::chrono::milliseconds timeout = 60s) {
    auto operation = std::make_shared<TestDeviceOperation>(name, timeout);
    const auto on = groups[rank]->on(rank);
    settle(rank, on ? (*on)->run(streams[rank], inOrder, operation, calls) : on.status(), {operation});
    return operation;
  }
  struct Message {
    bool isSend;
    int peer;
    void* data;
    std::size_t bytes;
    std::uint32_t tag = 0;
    std::uint32_t element = 0;
  };
  std::vector<OperationPtr> post(int rank, const std::vector<Message>& messages,
                                 std::chrono::milliseconds timeout = 60s) {
    std::vector<OperationPtr> operations;
    std::vector<EdgeMessage> entries;
    for (const Message& message : messages) {
      operations.push_back(std::make_shared<TestDeviceOperation>("message", timeout));
      entries.push_back({message.isSend,
                         message.peer,
                         message.data,
                         {message.tag, message.element, message.bytes},
                         operations.back()});
    }
    const auto on = groups[rank]->on(rank);
    settle(rank, on ? (*on)->post(streams[rank], std::move(entries)) : on.status(), operations);
    return operations;
  }
  // The user's stream waits for it, as Work::wait() does.
  void wait(int rank, const OperationPtr& operation) {
    operation->awaitLaunch();
    if (!operation->hasEnded()) {
      EXPECT_TRUE(operation->holdUp(streams[rank]));
    }
    operation->letGo();
  }
  void settle(int rank, const Status& status, const std::vector<OperationPtr>& operations) {
    if (status) return;
    if (status.code() != StatusCode::kInvalidArgument) groups[rank]->fail(status);
    for (const auto& operation : operations) operation->finish(status);
  }

  SimulatedCluster cluster;
  const DeviceRuntime runtime;
  const std::shared_ptr<TestMeeting> meeting;
  std::vector<cudaStream_t> streams;
  std::vector<std::shared_ptr<DeviceGroup>> groups;

 private:
  static NcclApi ncclOf(SimulatedCluster& cluster, bool hasNewerFunctions) {
    cluster.setNewerFunctions(hasNewerFunctions);
    return cluster.nccl();
  }

  std::vector<std::shared_ptr<DeviceWatch>> watches_;
  const std::vector<std::shared_ptr<TestTalk>> talks_;
  bool hasDead_ = false;
};

inline std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

// An all_reduce in place.
inline GroupOnDevice::Calls sumOf(const DeviceGroups& ranks, std::vector<int>& data) {
  return [&ranks, &data](NcclGroup& group, ncclComm_t communicator, cudaStream_t stream) {
    group.add(
        ranks.runtime.nccl.allReduce(data.data(), data.data(), data.size(), ncclInt32, ncclSum, communicator, stream),
        "ncclAllReduce");
  };
}

}  // namespace farandole::transport::testing
