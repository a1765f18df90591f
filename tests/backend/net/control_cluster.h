#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend/net/control_plane.h"

namespace farandole::net {

using namespace std::chrono_literals;

inline const std::string kTestToken = "0123456789abcdef0123456789abcdef";

// Counts what a rank is told.
class RecordingListener : public ControlListener {
 public:
  void peerFailed(int rank, const Status& status) override { record(failed_, rank, status); }
  void aborted(int rank, const Status& status) override { record(aborted_, rank, status); }
  std::shared_ptr<Departures> departures() override { return departures_; }
  std::string report() override { return report_; }
  void setReport(std::string text) { report_ = std::move(text); }  // before it joins

  std::map<int, std::vector<Status>> failed() const { return copy(failed_); }
  std::map<int, std::vector<Status>> aborted() const { return copy(aborted_); }
  // How often each has left all its groups.
  std::map<int, int> gone() const {
    std::map<int, int> times;
    for (const int rank : departures_->gone()) ++times[rank];
    return times;
  }
  // Those that have left a group.
  std::set<int> left() const {
    const std::vector<int> ranks = departures_->left();
    return {ranks.begin(), ranks.end()};
  }

  bool waitFor(const std::function<bool(const RecordingListener&)>& done, std::chrono::milliseconds limit = 10s) const {
    std::unique_lock lock(mutex_);
    const auto end = std::chrono::steady_clock::now() + limit;
    while (true) {
      lock.unlock();
      if (done(*this)) return true;
      lock.lock();
      if (std::chrono::steady_clock::now() >= end) return false;
      changed_.wait_for(lock, 5ms);
    }
  }
  bool waitForFailureOf(int rank, std::chrono::milliseconds limit = 10s) const {
    return waitFor([rank](const RecordingListener& l) { return l.failed().count(rank) > 0; }, limit);
  }
  bool waitForAbortBy(int rank, std::chrono::milliseconds limit = 10s) const {
    return waitFor([rank](const RecordingListener& l) { return l.aborted().count(rank) > 0; }, limit);
  }

 private:
  using Told = std::map<int, std::vector<Status>>;

  void record(Told& told, int rank, const Status& status) {
    std::lock_guard lock(mutex_);
    told[rank].push_back(status);
    changed_.notify_all();
  }
  Told copy(const Told& told) const {
    std::lock_guard lock(mutex_);
    return told;
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  Told failed_;
  Told aborted_;
  const std::shared_ptr<Departures> departures_ = std::make_shared<Departures>();
  std::string report_;
};

// The ranks of one group within this process: a plane each, on a few loops.
class ControlCluster {
 public:
  explicit ControlCluster(int size, ControlTimes times = {}) {
    for (int i = 0; i < std::min(size, 4); ++i) loops_.push_back(std::make_unique<EventLoop>("test"));
    for (int rank = 0; rank < size; ++rank) {
      auto plane = ControlPlane::listen(*loops_[static_cast<std::size_t>(rank) % loops_.size()], times);
      if (!plane) throw std::runtime_error(plane.status().toString());
      members_.push_back({(*plane)->address(), "host" + std::to_string(rank), 1000 + rank});
      planes_.push_back(std::move(plane).value());
      listeners_.push_back(std::make_shared<RecordingListener>());
      listeners_.back()->setReport("report of " + std::to_string(rank));
    }
  }

  int size() const { return static_cast<int>(planes_.size()); }
  const std::vector<ControlMember>& members() const { return members_; }
  ControlPlane& plane(int rank) { return *planes_[static_cast<std::size_t>(rank)]; }
  EventLoop& loop(int rank) { return *loops_[static_cast<std::size_t>(rank) % loops_.size()]; }
  RecordingListener& listener(int rank) { return *listeners_[static_cast<std::size_t>(rank)]; }
  std::shared_ptr<RecordingListener> sharedListener(int rank) { return listeners_[static_cast<std::size_t>(rank)]; }
  bool isAlive(int rank) const { return planes_[static_cast<std::size_t>(rank)] != nullptr; }

  void join(int rank, const std::string& group = "g") {
    const Status status = plane(rank).joinGroup(group, rank, members_, kTestToken, sharedListener(rank));
    ASSERT_TRUE(status.isOk()) << status.toString();
  }
  void joinAll(const std::string& group = "g") {
    for (int rank = 0; rank < size(); ++rank) join(rank, group);
  }
  void leave(int rank, const std::string& group = "g") {
    const Status status = plane(rank).leaveGroup(group);
    ASSERT_TRUE(status.isOk()) << status.toString();
  }
  // As a process that dies: no good-bye to groups that it has not left.
  void destroy(int rank) { planes_[static_cast<std::size_t>(rank)].reset(); }

  ~ControlCluster() {
    planes_.clear();
    for (auto& loop : loops_) loop->stop();
  }

 private:
  std::vector<std::unique_ptr<EventLoop>> loops_;
  std::vector<ControlMember> members_;
  std::vector<std::shared_ptr<RecordingListener>> listeners_;
  std::vector<std::unique_ptr<ControlPlane>> planes_;
};

}  // namespace farandole::net
