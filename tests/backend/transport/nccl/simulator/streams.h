#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "tests/backend/transport/nccl/simulator/core.h"

namespace farandole::testing {

struct Capture;
class Replay;

// One recording of an event. Those who wait hold the recording, so that the event may be recorded again meanwhile.
struct Moment {
  bool passed = false;
  bool captured = false;           // it is of a graph and never passes itself
  std::weak_ptr<Capture> capture;  // while that lasts
};

// What lies in a stream.
class Work {
 public:
  virtual ~Work() = default;
  // It is in a stream that runs, not in a capture.
  virtual void launched() {}
  // At the head of its stream: whether step() has something to do.
  virtual bool ready() const { return true; }
  // True: done. Called with the lock, which it may let go of meanwhile.
  virtual bool step(Lock& lock) = 0;
  // The same for one replay of a graph.
  virtual std::shared_ptr<Work> again(Replay& replay) const = 0;
};

// The user's own kernel; runs without the lock.
class FunctionWork : public Work {
 public:
  explicit FunctionWork(std::function<void()> function) : function_(std::move(function)) {}
  bool step(Lock& lock) override;
  std::shared_ptr<Work> again(Replay& replay) const override;

 private:
  std::function<void()> function_;
};

class RecordWork : public Work {
 public:
  explicit RecordWork(std::shared_ptr<Moment> moment) : moment_(std::move(moment)) {}
  const std::shared_ptr<Moment>& moment() const { return moment_; }
  bool step(Lock& lock) override;
  std::shared_ptr<Work> again(Replay& replay) const override;

 private:
  std::shared_ptr<Moment> moment_;
};

class WaitWork : public Work {
 public:
  explicit WaitWork(std::shared_ptr<Moment> moment) : moment_(std::move(moment)) {}
  const std::shared_ptr<Moment>& moment() const { return moment_; }
  bool ready() const override { return moment_->passed; }
  bool step(Lock& lock) override { return true; }
  std::shared_ptr<Work> again(Replay& replay) const override;

 private:
  std::shared_ptr<Moment> moment_;
};

// A kernel that lasts until it is told to end.
class HoldWork : public Work {
 public:
  void release() { released_ = true; }
  bool ready() const override { return released_; }
  bool step(Lock& lock) override { return true; }
  std::shared_ptr<Work> again(Replay& replay) const override;

 private:
  bool released_ = false;
};

struct Stream {
  enum class Kind : unsigned char { kCreated, kUsers, kReplay };

  cudaStream_t handle() { return reinterpret_cast<cudaStream_t>(this); }

  Kind kind = Kind::kCreated;
  int device = 0;
  bool destroyed = false;  // what was put still runs
  std::deque<std::shared_ptr<Work>> queue;
  std::deque<std::shared_ptr<HoldWork>> holds;  // not released
  std::shared_ptr<Capture> capture;             // what is put goes there
  std::shared_ptr<Capture> graph;               // the last capture that began here
};

// All streams, and the loop that runs them: each time one of those whose head can go, at random, so that a dependency
// that nobody stated shows. A stream lives to the end of the cluster; a destroyed one is known as such.
class Streams {
 public:
  explicit Streams(Core& core) : core_(core) {}

  void runUntilEnd();  // the executor thread's, without the lock
  std::shared_ptr<Stream> create(int device, Stream::Kind kind);
  // Null, and a violation, for what is no stream. A null handle is the legacy stream of `device`.
  Stream* find(cudaStream_t handle, int device, const char* function);
  void put(Stream& stream, std::shared_ptr<Work> work);
  void retire(Stream& stream) { stream.destroyed = true; }
  // None of the streams is captured into it any more.
  void leaveCapture(const std::shared_ptr<Capture>& capture);
  // The captures that are going on.
  std::vector<std::shared_ptr<Capture>> captures() const;
  int countCreated() const;

 private:
  std::shared_ptr<Stream> choose();

  Core& core_;
  std::map<cudaStream_t, std::shared_ptr<Stream>> known_;
  std::map<int, std::shared_ptr<Stream>> legacy_;
  std::vector<std::shared_ptr<Stream>> running_;
  std::vector<std::size_t> candidates_;
};

}  // namespace farandole::testing
