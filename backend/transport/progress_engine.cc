#include "backend/transport/progress_engine.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace farandole::transport {
namespace {

// How long a waiter progresses in vain before it yields its core after each time,
// and how long it does that before it sleeps: about what a Python peer takes to
// answer. Where every rank has a core it keeps its own for longer: what else runs
// there would get it for milliseconds (measured, beside a compiler: an all_reduce of
// 1 MiB took 600 us instead of 250).
constexpr std::chrono::nanoseconds kSpinTime = std::chrono::microseconds(6);
constexpr std::chrono::nanoseconds kSpinTimeOnOwnCore = std::chrono::microseconds(60);
constexpr auto kYieldTime = std::chrono::microseconds(50);
// The clock is first looked at after so many empty calls, when a message of a few
// bytes has long come, and again after as many.
constexpr int kSpinsBetweenLooks = 16;

// Two ranks that yield to each other on one core stay there for long, though
// another core is idle: the scheduler sees them run, and moves neither (measured:
// 3.5 us a message instead of 0.35; an all_reduce of 1 MiB 1400 us instead of 130).
// A yield that took long and brought what was waited for tells: after so much time
// of that kind in turn the thread steps aside; less and less often while it is in
// vain. A yield counts as 5 us at least; for 20 at most, and not at all where
// another program had the core for its whole share.
constexpr auto kLongYield = std::chrono::microseconds(1);
constexpr auto kForeignYield = std::chrono::milliseconds(1);
constexpr Clock::duration kLeastForYield = std::chrono::microseconds(5);
constexpr Clock::duration kMostForYield = std::chrono::microseconds(20);
constexpr Clock::duration kPatience = std::chrono::microseconds(40);
constexpr Clock::duration kLongestPatience = std::chrono::milliseconds(20);

// So do two loops, and each sleeps while the other one works (measured: an all_reduce of 80 MiB that nobody waits for
// 28 ms instead of 12). Shared memory tells the cores: who waits on that of the other one steps aside, not too often.
constexpr Clock::duration kBetweenMoves = std::chrono::milliseconds(1);

// Moves the calling thread to another core that it may run on, whichever, and
// leaves it as free as it was.
void stepAside() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  cpu_set_t others = allowed;
  CPU_CLR(sched_getcpu(), &others);
  if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
}

int pollTimeout(Clock::time_point deadline) {
  if (deadline == kNoDeadline) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000));
}

}  // namespace

ProgressEngine::ProgressEngine(std::unique_ptr<Transport> transport, net::EventLoop& loop)
    : transport_(std::move(transport)),
      loop_(loop),
      patience_(kPatience + getpid() % 7 * std::chrono::microseconds(8)),
      stepsAsideAfter_(patience_),
      descriptor_(loop.context()),
      tick_(loop.context()),
      deadlineTimer_(loop.context()),
      tickInterval_(kTick) {
  unwatched_ = Descriptor(fcntl(transport_->eventFd(), F_DUPFD_CLOEXEC, 0));
  if (!unwatched_) throw std::system_error(errno, std::generic_category(), "fcntl(F_DUPFD_CLOEXEC)");
  transport_->watchWaiter(hasWaiter_);
  transport_->onPeerFailed([this](PeerId peer, const Status& status) {
    for (Listener* listener : listeners_) listener->peerFailed(peer, status);
  });
  loop_.post([this] {
    sleepFromLoop();
    startDeadlineTimerFromLoop();
  });
}

void ProgressEngine::noteRanksOnHost(int ranks) {
  cpu_set_t allowed;
  const bool fits = sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) >= ranks;
  Access access(*this);
  ranksOnHost_ = std::max(ranksOnHost_, ranks);
  if (ranks == ranksOnHost_) everyRankHasACore_ = fits;
}

void ProgressEngine::addListener(Listener& listener) {
  Access access(*this);
  listeners_.push_back(&listener);
}

void ProgressEngine::removeListener(Listener& listener) {
  Access access(*this);
  std::erase(listeners_, &listener);
}

void ProgressEngine::acquire() {
  if (mutex_.try_lock()) return;
  contenders_.fetch_add(1);
  mutex_.lock();
  contenders_.fetch_sub(1);
}

void ProgressEngine::release() {
  announceCompletions();
  Leaver* leaver = std::exchange(leavers_, nullptr);
  if (deferred_.empty()) {
    mutex_.unlock();
  } else {
    unlockAndRunTasks();
  }
  while (leaver != nullptr) {
    Leaver& leaving = *std::exchange(leaver, leaver->nextLeaver_);  // it may be gone when it has left
    leaving.leave();
  }
}

void ProgressEngine::unlockAndRunTasks() {
  // The memory goes round between the engine and its threads.
  thread_local std::vector<std::function<void()>> spare;
  std::vector<std::function<void()>> tasks = std::exchange(spare, {});
  tasks.swap(deferred_);
  mutex_.unlock();
  for (auto& task : tasks) task();
  tasks.clear();
  spare = std::move(tasks);
}

void ProgressEngine::releaseAfterPosting() {
  // An armed worker does not look at what is posted: 156 of 1000 sends arrived without this.
  const bool mustLook = pendingPosted_ || (polledPosted_ && sleeperArmed_ && pollersAreReady(ownerPolling_));
  if ((mustLook && sleeperArmed_) || (completed_ && ownerPolling_)) {
    sleeperArmed_ = false;
    transport_->signal();
  }
  pendingPosted_ = polledPosted_ = false;
  if (isUnattended_ && !owner_.load(std::memory_order_relaxed)) wakeLoop();
  release();
}

void ProgressEngine::yieldToContenders() {
  if (contenders_.load(std::memory_order_relaxed) == 0) return;
  mutex_.unlock();
  for (int i = 0; i < 1000 && contenders_.load(std::memory_order_relaxed) != 0; ++i) sched_yield();
  acquire();  // counted: who has it meanwhile may wait for long, and lets this one in
}

void ProgressEngine::announceCompletions() {
  if (!completed_) return;
  completed_ = false;
  if (sleepers_.load(std::memory_order_relaxed) == 0) return;
  std::lock_guard lock(sleepMutex_);
  sleepCondition_.notify_all();
}

bool ProgressEngine::progress(bool again) {
  sleeperArmed_ = false;  // progress disarms, also when another thread armed in between
  bool any = again ? transport_->progressAgain() : transport_->progress();
  for (std::size_t i = 0; i < pollers_.size(); ++i) any |= pollers_[i]->poll();
  return any;
}

// All look, though one has seen something.
bool ProgressEngine::lookAround() {
  return std::count_if(listeners_.begin(), listeners_.end(), [](Listener* l) { return l->lookAround(); }) > 0;
}

// Pollers look after the transport is armed: what is written later wakes it up.
bool ProgressEngine::arm(bool isAwaited) { return transport_->arm() && !pollersAreReady(isAwaited) && !lookAround(); }

// All are asked, though one is: each has others ring.
bool ProgressEngine::pollersAreReady(bool isAwaited) {
  return std::count_if(pollers_.begin(), pollers_.end(), [&](Poller* p) { return p->isReady(isAwaited); }) > 0;
}

bool ProgressEngine::isWorkLeft() const {
  return numPending_ > 0 ||
         std::any_of(pollers_.begin(), pollers_.end(), [](const Poller* p) { return p->isUrgent(); });
}

void ProgressEngine::runDeferred() {
  announceCompletions();
  if (!hasDeferred()) return;
  release();
  acquire();
}

bool ProgressEngine::wait(const std::atomic<bool>& done, Clock::time_point deadline) {
  while (!done.load(std::memory_order_acquire)) {
    acquire();
    if (!owner_.load(std::memory_order_relaxed)) {
      owner_.store(true, std::memory_order_relaxed);
      bool slept = false;
      const bool isDone = progressAsOwner(done, deadline, slept);
      leaveOwnership(slept);
      return isDone;
    }
    // Counted with the transport held: whoever completes something, or leaves, sees this thread, or is seen by it.
    ++sleepers_;
    mutex_.unlock();
    {
      std::unique_lock lock(sleepMutex_);
      const auto wake = [&] { return done.load(std::memory_order_acquire) || !owner_.load(); };
      if (deadline == kNoDeadline) {
        sleepCondition_.wait(lock, wake);
      } else {
        sleepCondition_.wait_until(lock, deadline, wake);
      }
    }
    --sleepers_;
    if (deadline != kNoDeadline && Clock::now() >= deadline) break;
  }
  return done.load(std::memory_order_acquire);
}

bool ProgressEngine::progressAsOwner(const std::atomic<bool>& done, Clock::time_point deadline, bool& slept) {
  ++waits_;
  hasWaiter_ = true;
  sleeperArmed_ = false;
  int idle = 0;
  int yields = 0;
  int gaveWay = 0;  // yields that took long and brought something
  Clock::duration lastYield{};
  bool isSpinning = true;
  Clock::time_point yieldAt;  // known once it has spun for a while
  while (!done.load(std::memory_order_acquire)) {
    if (progress(isSpinning)) {
      if (lastYield > kLongYield && lastYield < kForeignYield) {
        ++gaveWay;
        noteGaveWay(lastYield);
      }
      lastYield = {};
      isSpinning = true;
      idle = 0;
      if (done.load(std::memory_order_relaxed)) break;  // what was deferred runs when this thread leaves
      runDeferred();
    } else {
      ++idle;
    }
    yieldToContenders();
    if (isSpinning && (idle == 0 || idle % kSpinsBetweenLooks != 0)) continue;
    if (done.load(std::memory_order_relaxed)) break;  // by who had the transport meanwhile, and signals only who sleeps
    const auto now = Clock::now();
    if (idle == kSpinsBetweenLooks) yieldAt = now + (everyRankHasACore_ ? kSpinTimeOnOwnCore : kSpinTime);
    if (now < yieldAt) continue;
    isSpinning = false;
    if (now < yieldAt + kYieldTime) {
      sched_yield();
      ++yields;
      lastYield = Clock::now() - now;
      continue;
    }
    if (deadline != kNoDeadline && now >= deadline) return false;
    if (!arm(/*isAwaited=*/true)) {
      runDeferred();
      continue;
    }
    sleeperArmed_ = ownerPolling_ = true;
    mutex_.unlock();
    pollfd descriptor{transport_->eventFd(), POLLIN, 0};
    poll(&descriptor, 1, pollTimeout(deadline));
    acquire();
    sleeperArmed_ = ownerPolling_ = false;
    slept = true;
  }
  if (gaveWay == 0 || 2 * gaveWay < yields) {
    timeGivenWay_ = {};
    stepsAsideAfter_ = patience_;
  }
  return true;
}

void ProgressEngine::noteGaveWay(Clock::duration yield) {
  timeGivenWay_ += std::clamp(yield, kLeastForYield, kMostForYield);
  // With more ranks than cores there is nowhere to go: every core has ranks to run.
  if (timeGivenWay_ < stepsAsideAfter_ || !everyRankHasACore_) return;
  timeGivenWay_ = {};
  stepsAsideAfter_ = std::min(2 * stepsAsideAfter_, kLongestPatience);
  stepAside();
}

bool ProgressEngine::leaveSharedCore() {
  const auto waits = [](const Poller* poller) { return poller->waitsForThisCore(); };
  if (!everyRankHasACore_ || std::none_of(pollers_.begin(), pollers_.end(), waits)) return false;
  const auto now = Clock::now();
  if (now - lastMove_ < kBetweenMoves) return false;
  lastMove_ = now;
  stepAside();
  for (Poller* poller : pollers_) poller->noteCore();  // that the other one does not come after it
  return true;
}

void ProgressEngine::leaveOwnership(bool slept) {
  hasWaiter_ = false;
  if (loopTicking_) {
    if (slept && isWorkLeft()) loop_.post([this] { onTickFromLoop(); });
  } else if (const auto now = Clock::now(); now - lastLeave_ < kTick) {
    // Threads wait again and again: from here on the loop looks by timer, and nobody pays for arming.
    loopTicking_ = true;
    loop_.post([this] { startTickFromLoop(); });
  } else {
    lastLeave_ = now;
    armForLoop();
  }
  if (isUnattended_ && isWorkLeft()) wakeLoop();
  isUnattended_ = false;
  owner_.store(false, std::memory_order_relaxed);
  if (sleepers_.load(std::memory_order_relaxed) != 0) {
    std::lock_guard lock(sleepMutex_);
    sleepCondition_.notify_all();
  }
  release();
}

// The loop sleeps on the event, and what the owner did has disarmed it.
void ProgressEngine::armForLoop() {
  for (int i = 0; i < 4; ++i) {
    if (arm(/*isAwaited=*/false)) {
      sleeperArmed_ = true;
      return;
    }
    progress();
  }
  transport_->signal();
}

}  // namespace farandole::transport
