#pragma once

#include <atomic>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/net/event_loop.h"
#include "backend/transport/descriptor.h"
#include "backend/transport/inline_mutex.h"
#include "backend/transport/transport.h"

namespace farandole::transport {

using Clock = std::chrono::steady_clock;
inline constexpr Clock::time_point kNoDeadline = Clock::time_point::max();

// Shares one Transport between the threads of a process, and sees that it is
// always progressed by somebody: by a thread that waits, itself, with no
// hand-over; and when nobody waits, by the event loop, which sleeps on the
// transport's descriptor. backend/THREADING.md tells the whole protocol.
class ProgressEngine {
 public:
  // Told, with the transport held, what concerns everybody who has messages in flight.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void peerFailed(PeerId peer, const Status& status) = 0;
    virtual void checkDeadlines(Clock::time_point now) = 0;
    // A thread is about to sleep until the transport wakes it, or the loop looks by
    // timer: for what is rare and in shared memory. True when something happened.
    virtual bool lookAround() { return false; }
  };

  // Something that goes on when others write to shared memory: looked at with
  // every progress. With the transport held.
  class Poller {
   public:
    virtual ~Poller() = default;
    // Goes on as far as it can; true when it did.
    virtual bool poll() = 0;
    // Before the process sleeps: whether it can go on. If not, it has the others ring when it can; where nobody waits
    // only if it has to go on by itself.
    virtual bool isReady(bool isAwaited) = 0;
    // Whether it has to go on though nobody waits.
    virtual bool isUrgent() const { return false; }
    // Whether it waits for somebody who goes on, as he did last, on the core of the calling thread.
    virtual bool waitsForThisCore() const { return false; }
    // The calling thread, which goes on with it, runs on another core now.
    virtual void noteCore() {}
  };

  // Something that has ended, with what is left to do for that once the transport is let go of. In one list at a time.
  class Leaver {
   public:
    virtual ~Leaver() = default;

   private:
    friend class ProgressEngine;
    virtual void leave() = 0;
    Leaver* nextLeaver_ = nullptr;
  };

  // Exclusive use of the transport, for posting and cancelling. Short: the
  // thread that waits for a message is held up meanwhile.
  class Access {
   public:
    explicit Access(ProgressEngine& engine) : engine_(engine) { engine_.acquire(); }
    ~Access() { engine_.releaseAfterPosting(); }
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;
    Transport& transport() const { return *engine_.transport_; }

   private:
    ProgressEngine& engine_;
  };

  ProgressEngine(std::unique_ptr<Transport> transport, net::EventLoop& loop);
  // The loop must have been stopped, and no operation may be in flight.
  ~ProgressEngine() = default;

  // Waits until `done` is set by a completion; false when the deadline came first.
  bool wait(const std::atomic<bool>& done, Clock::time_point deadline);

  // That so many ranks of a group, this one included, share this host. Nothing held.
  void noteRanksOnHost(int ranks);

  void addListener(Listener& listener);
  void removeListener(Listener& listener);

  // The next three only with the transport held (in Access, a callback, a Listener).
  Transport& transport() { return *transport_; }
  // An operation was left pending: whoever sleeps must wake up for it. And it is no longer.
  void notePending() {
    pendingPosted_ = true;
    ++numPending_;
  }
  void noteSettled() { --numPending_; }
  // One of a poller's was, or has to go on by itself from now on: whoever sleeps asks it again.
  void notePolled() { polledPosted_ = true; }
  // And whoever posted it may not wait for long: a loop that looks by timer looks at once.
  void noteUnattended() { isUnattended_ = true; }
  // One that was left pending before has posted more.
  void notePosted() { pendingPosted_ = true; }
  // An operation was completed: whoever waits must look.
  void noteCompletion() { completed_ = true; }
  void addPoller(Poller& poller) { pollers_.push_back(&poller); }
  void removePoller(Poller& poller) { std::erase(pollers_, &poller); }
  // Runs `task` once the transport is let go of.
  void defer(std::function<void()> task) { deferred_.push_back(std::move(task)); }
  // Has it leave() then, after all tasks: what every message needs, and so without a task of its own.
  void addLeaver(Leaver& leaver) { leaver.nextLeaver_ = std::exchange(leavers_, &leaver); }

 private:
  friend class Access;
  friend struct ProgressEngineTest;

  // How often the loop looks by timer while threads wait again and again, which progress by themselves: far less often
  // where it found nothing to do. Its waking costs them 30 us of a core (measured in a virtual machine).
  static constexpr auto kTick = std::chrono::microseconds(500);

  void acquire();
  void release();
  bool hasDeferred() const { return leavers_ != nullptr || !deferred_.empty(); }
  void unlockAndRunTasks();
  void releaseAfterPosting();
  void yieldToContenders();
  void announceCompletions();
  void runDeferred();
  bool progressAsOwner(const std::atomic<bool>& done, Clock::time_point deadline, bool& slept);
  // A yield let somebody run who brought what was waited for.
  void noteGaveWay(Clock::duration yield);
  void leaveOwnership(bool slept);
  // From a core that the loop shares with who it waits for; true when it has.
  bool leaveSharedCore();
  void armForLoop();
  // Advances the transport and the pollers; true when something happened. Only by
  // whoever is responsible for arming afterwards. `again`: by who calls it at once again.
  bool progress(bool again = false);
  bool arm(bool isAwaited);
  bool lookAround();
  bool pollersAreReady(bool isAwaited);
  // Whether somebody has to look though nobody waits.
  bool isWorkLeft() const;

  void watchFromLoop();
  void sleepFromLoop();
  void onEventFromLoop();
  void startTickFromLoop();
  void onTickFromLoop();
  void wakeLoop();
  void progressFromLoop();
  void tickAgainFromLoop(Clock::duration interval);
  void startDeadlineTimerFromLoop();

  const std::unique_ptr<Transport> transport_;
  net::EventLoop& loop_;

  InlineMutex mutex_;               // held by whoever uses the transport
  std::atomic<int> contenders_{0};  // threads that wait for mutex_

  // Guarded by mutex_.
  bool pendingPosted_ = false;
  bool polledPosted_ = false;
  int numPending_ = 0;  // operations, but for those of pollers
  bool completed_ = false;
  bool sleeperArmed_ = false;  // somebody sleeps and relies on the transport's event
  bool ownerPolling_ = false;  // that somebody is the owner
  bool isUnattended_ = false;  // something is, that the loop does not know of
  bool loopTicking_ = false;   // the loop looks by timer, not by event
  bool hasWaiter_ = false;
  std::uint64_t waits_ = 0;
  int ranksOnHost_ = 1;
  bool everyRankHasACore_ = false;  // of this host; not known before a group is made
  const Clock::duration patience_;  // differs from process to process: not both step aside at once
  Clock::duration timeGivenWay_{};  // in turn
  Clock::duration stepsAsideAfter_;
  Clock::time_point lastLeave_;  // of an owner, while the loop sleeps
  Clock::time_point lastMove_;   // of the loop, to another core
  std::vector<std::function<void()>> deferred_;
  Leaver* leavers_ = nullptr;
  std::vector<Listener*> listeners_;
  std::vector<Poller*> pollers_;

  // The thread that progresses while it waits. Others sleep until it completes
  // something of theirs, or leaves.
  std::atomic<bool> owner_{false};
  std::atomic<int> sleepers_{0};
  std::mutex sleepMutex_;
  std::condition_variable sleepCondition_;

  // The loop's. The transport's descriptor is with asio while the loop sleeps on it, else in `unwatched_`.
  boost::asio::posix::stream_descriptor descriptor_;
  Descriptor unwatched_;
  boost::asio::steady_timer tick_;
  boost::asio::steady_timer deadlineTimer_;
  Clock::duration tickInterval_;
  std::uint64_t waitsSeen_ = 0;
  bool waitingForEvent_ = false;
};

}  // namespace farandole::transport
