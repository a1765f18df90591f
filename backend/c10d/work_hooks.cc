#include "backend/c10d/work_hooks.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "backend/c10d/callback_threads.h"

namespace farandole::backend {
namespace {

template <typename Call>
void runGuarded(const char* kind, const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    TORCH_WARN("farandole: ", kind, " hook raised: ", error.what());
  } catch (...) {
    TORCH_WARN("farandole: ", kind, " hook raised something that is no std::exception");
  }
}

// A template, so that torch without these hooks never sees the fields.
template <typename Hook>
void callCompletionHook(const Hook& hook, const WorkReport& report) {
  if constexpr (!std::is_same_v<Hook, std::function<void()>>) {
    [&]<typename Args>(const std::function<void(const Args&)>& typed) {
      Args args;
      args.duration_ms = report.duration().count();
      for (const std::uint64_t key : report.keys) {
        if (key == 0) continue;  // it began before there was this hook
        args.completionKey = key;
        typed(args);
      }
    }(hook);
  }
}

}  // namespace

// One followed work: counted until it was reported, or is gone without having begun.
class WorkHooks::Followed {
 public:
  explicit Followed(std::shared_ptr<WorkHooks> hooks) : hooks_(std::move(hooks)) {
    std::lock_guard lock(hooks_->mutex_);
    for (Extension& extension : hooks_->extensions_) {
      if (!std::exchange(extension.hasWork, true)) extensions_.push_back(extension.id);
    }
    ++hooks_->numFollowed_;
  }
  Followed(const Followed&) = delete;
  Followed& operator=(const Followed&) = delete;
  ~Followed() { end(); }

  void report(const WorkReport& report) {
    hooks_->report(report);
    if (report.of != WorkReport::Of::kPart) end();
  }

 private:
  void end() {
    std::lock_guard lock(hooks_->mutex_);
    if (std::exchange(hasEnded_, true)) return;
    std::erase_if(hooks_->extensions_, [&](const Extension& extension) {
      return std::find(extensions_.begin(), extensions_.end(), extension.id) != extensions_.end();
    });
    hooks_->updateActive();
    if (--hooks_->numFollowed_ == 0) hooks_->idle_.notify_all();
  }

  const std::shared_ptr<WorkHooks> hooks_;
  std::vector<std::uint64_t> extensions_;  // those that end with this work
  bool hasEnded_ = false;
};

WorkHooks::OnDone WorkHooks::makeFollower() {
  return OnDone([followed = std::make_shared<Followed>(shared_from_this())](const WorkReport& report) {
    followed->report(report);
  });
}

std::chrono::milliseconds WorkHooks::extraTimeout() {
  if (!isEachCounted_.load(std::memory_order_relaxed)) return {};
  std::lock_guard lock(mutex_);
  std::chrono::milliseconds sum{};
  for (const Extension& extension : extensions_) sum += extension.time;
  return sum;
}

std::uint64_t WorkHooks::keyIfTold() const {
  static std::atomic<std::uint64_t> next{1};
  return areTold() ? next.fetch_add(1, std::memory_order_relaxed) : 0;
}

void WorkHooks::report(const WorkReport& report) {
  std::shared_ptr<const InfoHook> infoHook;
  std::vector<std::shared_ptr<const CompletionHook>> completionHooks;
  {
    std::lock_guard lock(mutex_);
    if (report.of != WorkReport::Of::kPart) infoHook = infoHook_;
    if (report.isSuccess && !report.keys.empty()) {
      for (const auto& [id, hook] : completionHooks_) completionHooks.push_back(hook);
    }
  }
  if (infoHook) {
    runGuarded("completion", [&] {
      (*infoHook)(std::make_shared<::c10d::WorkInfo>(report.type, report.sequence, report.started, report.finished,
                                                     report.duration()));
    });
  }
  for (const auto& hook : completionHooks) {
    runGuarded("completion", [&] { callCompletionHook(*hook, report); });
  }
  // The parts have told of their failures.
  if (!report.isSuccess && report.of != WorkReport::Of::kParts) startAbortHooks();
}

void WorkHooks::startAbortHooks() {
  {
    std::lock_guard lock(mutex_);
    if (abortHooks_.empty()) return;
    isAbortDue_ = true;
    if (std::exchange(isAborting_, true)) return;
  }
  // One thread for all, and one further run for all that fails meanwhile: a group that ends fails all that is pending.
  runBeforeExit([hooks = shared_from_this()] {
    std::unique_lock lock(hooks->mutex_);
    while (std::exchange(hooks->isAbortDue_, false)) {
      lock.unlock();
      hooks->runAbortHooks();
      lock.lock();
    }
    hooks->isAborting_ = false;
    hooks->idle_.notify_all();
  });
}

void WorkHooks::runAbortHooks() {
  std::vector<std::shared_ptr<const AbortHook>> hooks;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, hook] : abortHooks_) hooks.push_back(hook);
  }
  for (const auto& hook : hooks) runGuarded("abort", *hook);
}

void WorkHooks::waitForFollowed() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [&] { return numFollowed_ == 0 && !isAborting_; });
}

void WorkHooks::updateActive() {
  areTold_ = isTimed_ || infoHook_ != nullptr || !completionHooks_.empty();
  isEachCounted_ = areTold_ || !extensions_.empty();
  isActive_ = isEachCounted_ || !abortHooks_.empty();
}

void WorkHooks::setInfoHook(std::shared_ptr<const InfoHook> hook) {
  std::lock_guard lock(mutex_);
  infoHook_ = std::move(hook);
  updateActive();
}

void WorkHooks::enableTiming() {
  std::lock_guard lock(mutex_);
  isTimed_ = true;
  updateActive();
}

void WorkHooks::addAbortHook(std::int64_t id, AbortHook hook) {
  auto shared = std::make_shared<const AbortHook>(std::move(hook));
  std::lock_guard lock(mutex_);
  abortHooks_[id].swap(shared);
  updateActive();
}

void WorkHooks::removeAbortHook(std::int64_t id) {
  decltype(abortHooks_)::node_type gone;  // destroyed with the lock let go of
  std::lock_guard lock(mutex_);
  gone = abortHooks_.extract(id);
  updateActive();
}

void WorkHooks::addCompletionHook(std::int64_t id, CompletionHook hook) {
  auto shared = std::make_shared<const CompletionHook>(std::move(hook));
  std::lock_guard lock(mutex_);
  completionHooks_[id].swap(shared);
  updateActive();
}

void WorkHooks::removeCompletionHook(std::int64_t id) {
  decltype(completionHooks_)::node_type gone;
  std::lock_guard lock(mutex_);
  gone = completionHooks_.extract(id);
  updateActive();
}

void WorkHooks::extendTimeout(std::chrono::milliseconds extension) {
  std::lock_guard lock(mutex_);
  extensions_.push_back({nextExtension_++, extension});
  updateActive();
}

std::shared_ptr<PartsReport> PartsReport::of(const WorkHooks::OnDone& onDone) {
  if (!onDone || onDone.hearsOfFailuresOnly()) return nullptr;
  return std::shared_ptr<PartsReport>(new PartsReport(onDone));
}

WorkHooks::OnDone PartsReport::expect(std::size_t parts) {
  std::lock_guard lock(mutex_);
  numOpen_ += parts;
  return WorkHooks::OnDone([self = shared_from_this()](const WorkReport& part) { self->endPart(part); });
}

void PartsReport::endPart(WorkReport part) {
  part.of = WorkReport::Of::kPart;
  onDone_(part);
  {
    std::lock_guard lock(mutex_);
    if (!whole_) {
      part.keys.clear();
      whole_ = std::move(part);
    } else {
      whole_->sequence = std::min(whole_->sequence, part.sequence);
      whole_->isSuccess = whole_->isSuccess && part.isSuccess;
      whole_->started = std::min(whole_->started, part.started);
      whole_->finished = std::max(whole_->finished, part.finished);
    }
  }
  endOne();
}

void PartsReport::endOne() {
  {
    std::lock_guard lock(mutex_);
    if (--numOpen_ > 0) return;
  }
  if (!whole_) return;
  whole_->type = ::c10d::OpType::COALESCED;
  whole_->of = WorkReport::Of::kParts;
  onDone_(*whole_);
}

}  // namespace farandole::backend
