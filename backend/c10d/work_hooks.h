#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace farandole::backend {

// How a work ended.
struct WorkReport {
  // A batch is one call with several works. Each tells of its own part, and the last one of the call as well.
  enum class Of { kCall, kPart, kParts };

  ::c10d::OpType type;
  std::uint64_t sequence;
  c10::SmallVector<std::uint64_t, 1> keys;  // what torch knows by: the works that it was given for this
  bool isSuccess;
  std::chrono::steady_clock::time_point started;
  std::chrono::steady_clock::time_point finished;
  Of of = Of::kCall;

  std::chrono::duration<float, std::milli> duration() const { return finished - started; }
};

// What torch passes to registerCompletionHook; nothing where it has none (torch 2.11).
template <typename Backend>
struct CompletionHookOf {
  using Hook = std::function<void()>;
};
template <typename Backend>
requires requires { &Backend::registerCompletionHook; }
struct CompletionHookOf<Backend> {
  template <typename H>
  static H hookOf(void (Backend::*)(std::int64_t, H));
  using Hook = decltype(hookOf(&Backend::registerCompletionHook));
};
using CompletionHook = CompletionHookOf<::c10d::Backend>::Hook;

// Who listens to the works of one group, and what it is told. While nobody
// does, a work costs one relaxed load; where abort hooks are all there is, as in
// each group of torch 2.15, it tells of its failure and no more.
//
// Thread: any. Hooks run with nothing held: abort hooks on threads of their own,
// since torch's flight recorder dumps in one, for seconds; the others on the
// thread that completes the work. What they throw is logged.
class WorkHooks : public std::enable_shared_from_this<WorkHooks> {
 public:
  class OnDone;
  using InfoHook = std::function<void(std::shared_ptr<::c10d::WorkInfo>)>;
  using AbortHook = std::function<void()>;

  // What to call when a work that begins now has ended; empty while nobody listens.
  OnDone follow();
  // Whether somebody hears of each end, and when it was; not only of failures.
  bool areTold() const { return areTold_.load(std::memory_order_relaxed); }
  // What torch knows a work by that begins now: a number that no other one in this process gets; 0 while nobody hears
  // of its end.
  std::uint64_t keyIfTold() const;
  // What follow() adds to the timeout of a work that begins now.
  std::chrono::milliseconds extraTimeout();

  // Hooks are shared, never copied: copying one of Python needs its lock.
  void setInfoHook(std::shared_ptr<const InfoHook> hook);
  void enableTiming();
  void addAbortHook(std::int64_t id, AbortHook hook);
  void removeAbortHook(std::int64_t id);
  void addCompletionHook(std::int64_t id, CompletionHook hook);
  void removeCompletionHook(std::int64_t id);
  // Adds to the timeout of what begins, until the first of it has ended.
  void extendTimeout(std::chrono::milliseconds extension);

  // Runs the abort hooks, without waiting for them.
  void startAbortHooks();
  // Blocks until the hooks have run for all that was followed.
  void waitForFollowed();

 private:
  struct Extension {
    std::uint64_t id;
    std::chrono::milliseconds time;
    bool hasWork = false;
  };

  class Followed;

  OnDone makeFollower();
  void report(const WorkReport& report);
  void runAbortHooks();
  void updateActive();

  std::atomic<bool> isActive_{false};
  std::atomic<bool> isEachCounted_{false};  // whether the end of each work matters, not only a failure
  std::atomic<bool> areTold_{false};
  std::mutex mutex_;
  std::condition_variable idle_;
  bool isTimed_ = false;
  std::shared_ptr<const InfoHook> infoHook_;
  std::map<std::int64_t, std::shared_ptr<const AbortHook>> abortHooks_;
  std::map<std::int64_t, std::shared_ptr<const CompletionHook>> completionHooks_;
  std::vector<Extension> extensions_;
  std::uint64_t nextExtension_ = 0;
  std::size_t numFollowed_ = 0;
  bool isAborting_ = false;  // the abort hooks run, or are about to
  bool isAbortDue_ = false;  // something failed that their runs so far did not follow
};

// Hears of the end of one work: of each end, or of failures only. Empty while nobody listens.
class WorkHooks::OnDone {
 public:
  using Call = std::function<void(const WorkReport&)>;

  OnDone() = default;
  explicit OnDone(Call call) : call_(std::move(call)) {}
  // Runs the abort hooks when the work fails.
  explicit OnDone(std::shared_ptr<WorkHooks> hooks) : hooks_(std::move(hooks)) {}

  explicit operator bool() const { return call_ != nullptr || hooks_ != nullptr; }
  bool hearsOfFailuresOnly() const { return hooks_ != nullptr; }
  void operator()(const WorkReport& report) const {
    if (call_ != nullptr) return call_(report);
    if (!report.isSuccess) tellFailure();
  }
  // To who hears of failures only.
  void tellFailure() const { hooks_->startAbortHooks(); }

 private:
  Call call_;
  std::shared_ptr<WorkHooks> hooks_;
};

inline WorkHooks::OnDone WorkHooks::follow() {
  if (!isActive_.load(std::memory_order_relaxed)) return {};
  return isEachCounted_.load(std::memory_order_relaxed) ? makeFollower() : OnDone(shared_from_this());
}

// Makes one call of the reports of several works.
//
// Thread: any.
class PartsReport : public std::enable_shared_from_this<PartsReport> {
 public:
  // Null where nobody hears of each end: the parts tell of their failures themselves.
  static std::shared_ptr<PartsReport> of(const WorkHooks::OnDone& onDone);

  // What to call when this many more works, or parts of one, have ended: by each of them.
  WorkHooks::OnDone expect(std::size_t parts = 1);
  // There will be no more.
  void close() { endOne(); }

 private:
  explicit PartsReport(WorkHooks::OnDone onDone) : onDone_(std::move(onDone)) {}
  void endPart(WorkReport part);
  void endOne();

  const WorkHooks::OnDone onDone_;
  std::mutex mutex_;
  std::size_t numOpen_ = 1;  // close() is one
  std::optional<WorkReport> whole_;
};

}  // namespace farandole::backend
