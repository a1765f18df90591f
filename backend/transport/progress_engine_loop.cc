// The half of the progress engine that runs on the event loop.
#include <cassert>

#include "backend/transport/progress_engine.h"

namespace farandole::transport {
namespace {

// In vain, before it sleeps.
constexpr int kLoopSpins = 300;
constexpr auto kLongTick = std::chrono::milliseconds(4);
constexpr auto kDeadlineInterval = std::chrono::milliseconds(250);

}  // namespace

void ProgressEngine::watchFromLoop() {
  if (unwatched_) {
    descriptor_.assign(unwatched_.get());
    unwatched_.release();
  }
  if (waitingForEvent_) return;
  waitingForEvent_ = true;
  descriptor_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this](boost::system::error_code error) {
    if (!error) onEventFromLoop();
  });
}

void ProgressEngine::sleepFromLoop() {
  assert(loop_.inLoop());
  watchFromLoop();  // before arming: the event that follows that is seen for sure
  acquire();
  loopTicking_ = false;
  while (!owner_.load() && !sleeperArmed_) {
    if (arm(/*isAwaited=*/false)) {
      sleeperArmed_ = true;
    } else {
      progress();
      runDeferred();
      yieldToContenders();
    }
  }
  release();
}

void ProgressEngine::onEventFromLoop() {
  assert(loop_.inLoop());
  waitingForEvent_ = false;
  acquire();
  if (loopTicking_) {  // the event was under way when the owner chose the timer
    release();
    return;
  }
  if (owner_.load()) {
    loopTicking_ = true;
    release();
    startTickFromLoop();
    return;
  }
  progressFromLoop();
}

// For as long as there is something to do, and then sleeps. With the transport held, which it lets go of.
void ProgressEngine::progressFromLoop() {
  sleeperArmed_ = false;
  do {
    int idle = 0;
    do {
      idle = progress() ? 0 : idle + 1;
      runDeferred();
      yieldToContenders();
    } while (!owner_.load() && (idle == 0 || (idle < kLoopSpins && isWorkLeft())));
  } while (!owner_.load() && leaveSharedCore());
  release();
  sleepFromLoop();
}

void ProgressEngine::wakeLoop() {
  isUnattended_ = false;
  if (!loopTicking_) return;  // the event wakes it
  loop_.post([this] {
    acquire();
    isUnattended_ = owner_.load();  // it is attended to, until that leaves
    if (!loopTicking_ || isUnattended_) return release();
    tick_.cancel();
    loopTicking_ = false;
    progressFromLoop();
  });
}

void ProgressEngine::startTickFromLoop() {
  assert(loop_.inLoop());
  acquire();
  const bool isTicking = loopTicking_;
  release();
  if (!isTicking) return;  // it was about to sleep when the owner chose the timer, and does
  // What asio has it waits for, asked or not: each event would wake the loop beside who is at work (16 MiB between two
  // hosts: 90 times).
  if (descriptor_.is_open()) unwatched_ = Descriptor(descriptor_.release());
  waitingForEvent_ = false;
  tickAgainFromLoop(kTick);
}

void ProgressEngine::tickAgainFromLoop(Clock::duration interval) {
  tickInterval_ = interval;
  tick_.expires_after(interval);  // replaces a tick that is outstanding
  tick_.async_wait([this](boost::system::error_code error) {
    if (!error) onTickFromLoop();
  });
}

void ProgressEngine::onTickFromLoop() {
  assert(loop_.inLoop());
  // Where somebody is at work there is nothing to do, and no reason to make him wait.
  if (owner_.load() || !mutex_.try_lock()) return tickAgainFromLoop(kLongTick);
  const bool isTicking = loopTicking_;
  const bool waited = waits_ != waitsSeen_;
  const bool isWanted = isTicking && isWorkLeft() && !owner_.load();
  waitsSeen_ = waits_;
  if (isWanted) {
    progress();
    lookAround();
    runDeferred();
  }
  release();
  if (!isTicking) return;
  // With something left it sleeps, to be woken up for that. Else threads may wait again soon, as in the next part of a
  // training step: to go to sleep in between and tick anew wakes the loop more often than to tick on.
  const bool hasBeenLong = tickInterval_ == kLongTick;
  if (!waited && !owner_.load() && (isWanted || hasBeenLong)) {
    tick_.cancel();
    sleepFromLoop();
    return;
  }
  tickAgainFromLoop(isWanted ? kTick : kLongTick);
}

void ProgressEngine::startDeadlineTimerFromLoop() {
  deadlineTimer_.expires_after(kDeadlineInterval);
  deadlineTimer_.async_wait([this](boost::system::error_code error) {
    if (error) return;
    {
      Access access(*this);
      const auto now = Clock::now();
      access.transport().look(now);
      for (std::size_t i = 0; i < pollers_.size(); ++i) pollers_[i]->poll();  // what nobody was in a hurry for
      for (Listener* listener : listeners_) listener->checkDeadlines(now);
    }
    startDeadlineTimerFromLoop();
  });
}

}  // namespace farandole::transport
