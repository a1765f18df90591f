#include "backend/transport/progress_engine.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <future>
#include <thread>
#include <vector>

#include "backend/p2p/message_tag.h"
#include "backend/transport/loopback/loopback_transport.h"

namespace farandole::transport {
namespace {

using namespace std::chrono_literals;

struct Flagged : Request {
  std::atomic<bool> done{false};
  ProgressEngine* engine = nullptr;
  Flagged() {
    onDone = [](Request& request) {
      auto& self = static_cast<Flagged&>(request);
      self.engine->noteCompletion();
      self.done.store(true, std::memory_order_release);  // last: the waiter may reuse the memory
    };
  }
};

// Two engines that talk over a loopback fabric, each with a loop of its own.
class ProgressEngineTest : public testing::Test {
 public:
  ProgressEngineTest()
      : fabric_(LoopbackFabric::create(0)),
        a_(fabric_->makeTransport(), loopA_),
        b_(fabric_->makeTransport(), loopB_) {}
  ~ProgressEngineTest() override {
    loopA_.stop();
    loopB_.stop();
  }

 protected:
  void send(std::uint64_t tag, const int& value, Flagged& request) {
    request.engine = &a_;
    ProgressEngine::Access access(a_);
    access.transport().send(PeerId{1}, tag, &value, sizeof value, request);
    if (!request.done) a_.notePending();
  }
  void recv(std::uint64_t tag, int& value, Flagged& request) {
    request.engine = &b_;
    ProgressEngine::Access access(b_);
    access.transport().recv(kAnyPeer, tag, p2p::kExactMask, &value, sizeof value, request);
    if (!request.done) b_.notePending();
  }

  net::EventLoop loopA_{"loop-a"};
  net::EventLoop loopB_{"loop-b"};
  std::shared_ptr<LoopbackFabric> fabric_;
  ProgressEngine a_;
  ProgressEngine b_;
};

TEST_F(ProgressEngineTest, MessagesArriveThoughNobodyEverWaits) {
  constexpr int kMessages = 10000;
  std::vector<int> in(kMessages, -1);
  std::vector<int> out(kMessages);
  std::vector<Flagged> sends(kMessages);
  std::vector<Flagged> recvs(kMessages);
  for (int i = 0; i < kMessages; ++i) {
    out[i] = i;
    recv(i, in[i], recvs[i]);
    send(i, out[i], sends[i]);
  }
  const auto end = Clock::now() + 30s;
  const auto allDone = [&] {
    return std::all_of(recvs.begin(), recvs.end(), [](const Flagged& r) { return r.done.load(); }) &&
           std::all_of(sends.begin(), sends.end(), [](const Flagged& r) { return r.done.load(); });
  };
  while (!allDone() && Clock::now() < end) std::this_thread::sleep_for(1ms);
  ASSERT_TRUE(allDone());
  EXPECT_EQ(in, out);
}

TEST_F(ProgressEngineTest, ManyThreadsWaitAtOnceAndEachIsWokenByItsOwnMessage) {
  constexpr int kThreads = 8;
  constexpr int kRounds = 300;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  std::atomic<int> wrong{0};
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < kRounds; ++round) {
        const int value = t * 1000 + round;
        int in = -1;
        Flagged sent;
        Flagged received;
        recv(t, in, received);
        send(t, value, sent);
        if (!b_.wait(received.done, Clock::now() + 20s) || !a_.wait(sent.done, kNoDeadline) || in != value) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(ProgressEngineTest, AWaitWithoutAMessageEndsAtItsDeadline) {
  int in = 0;
  Flagged received;
  recv(1, in, received);
  const auto start = Clock::now();
  EXPECT_FALSE(b_.wait(received.done, start + 50ms));
  EXPECT_GE(Clock::now() - start, 50ms);
  const int value = 5;
  Flagged sent;
  send(1, value, sent);
  EXPECT_TRUE(b_.wait(received.done, kNoDeadline));
  EXPECT_TRUE(a_.wait(sent.done, kNoDeadline));
  EXPECT_EQ(in, 5);
}

TEST_F(ProgressEngineTest, ASleepingWaiterWakesForAMessageThatComesLate) {
  int in = 0;
  Flagged received;
  Flagged sent;
  const int value = 9;
  recv(2, in, received);
  std::thread late([&] {
    std::this_thread::sleep_for(100ms);
    send(2, value, sent);
    a_.wait(sent.done, kNoDeadline);
  });
  EXPECT_TRUE(b_.wait(received.done, Clock::now() + 20s));
  late.join();
  EXPECT_EQ(in, 9);
}

// How often the calling thread has slept.
std::uint64_t sleepsOfThisThread() {
  rusage used{};
  getrusage(RUSAGE_THREAD, &used);
  return static_cast<std::uint64_t>(used.ru_nvcsw);
}

TEST_F(ProgressEngineTest, ATickingLoopIsNotWokenByWhatWakesTheOwner) {
  const auto sleepsOfLoop = [&] {
    std::promise<std::uint64_t> sleeps;
    loopB_.post([&] { sleeps.set_value(sleepsOfThisThread()); });
    return sleeps.get_future().get();
  };
  int in = 0;
  Flagged received;
  recv(1, in, received);
  std::thread owner([&] { b_.wait(received.done, kNoDeadline); });
  const auto signal = [&] {
    std::this_thread::sleep_for(200us);
    ProgressEngine::Access access(b_);
    access.transport().signal();
  };
  for (int i = 0; i < 100; ++i) signal();  // the first one finds an owner, so that the loop ticks
  const auto start = Clock::now();
  const std::uint64_t before = sleepsOfLoop();
  for (int i = 0; i < 1000; ++i) signal();
  const std::uint64_t slept = sleepsOfLoop() - before;
  const auto ticks = (Clock::now() - start) / 4ms;
  const int value = 3;
  Flagged sent;
  send(1, value, sent);
  owner.join();
  a_.wait(sent.done, kNoDeadline);
  EXPECT_EQ(in, 3);
  EXPECT_LT(slept, 3 * ticks + 20);
}

// By the sum of many: a loop that looks by timer is late by up to 4 ms.
TEST_F(ProgressEngineTest, ATickingLoopLooksAtOnceAtWhatIsLeftUnattended) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "two waits are compared by the clock, of which ThreadSanitizer leaves no difference";
#endif
  std::uint64_t tag = 0;
  const auto exchange = [&](bool waits, bool isUnattended) {
    int in = 0;
    const int value = 1;
    Flagged received;
    Flagged sent;
    recv(++tag, in, received);
    send(tag, value, sent);
    if (waits) b_.wait(received.done, kNoDeadline);
    const auto start = Clock::now();
    if (isUnattended) {
      ProgressEngine::Access access(b_);
      b_.noteUnattended();
    }
    while (!received.done) std::this_thread::sleep_for(20us);
    const auto late = Clock::now() - start;
    while (!sent.done) a_.wait(sent.done, kNoDeadline);
    return late;
  };
  // By the median, and in turns: others may run on this machine, now more and now less.
  const auto isSooner = [&] {
    std::array<std::vector<Clock::duration>, 2> late;
    for (int i = 0; i < 42; ++i) {
      const auto busyUntil = Clock::now() + 10ms;  // threads wait again and again: the loop ticks, less and less often
      while (Clock::now() < busyUntil) exchange(true, false);
      late[i % 2].push_back(exchange(false, i % 2 == 1));
    }
    for (auto& times : late) std::ranges::sort(times);
    return 3 * late[1][10] < late[0][10];
  };
  bool wasSooner = false;
  for (const auto end = Clock::now() + 60s; !wasSooner && Clock::now() < end;) wasSooner = isSooner();
  EXPECT_TRUE(wasSooner);
}

// On whatever core: the loop can only try another one, once.
struct WaitsForItsCore final : ProgressEngine::Poller {
  bool poll() override { return false; }
  bool isReady(bool) override { return false; }
  bool waitsForThisCore() const override {
    ++asked;
    if (moves == 0) from = sched_getcpu();
    return true;
  }
  void noteCore() override {
    if (moves++ == 0) to = sched_getcpu();
  }
  mutable std::atomic<int> asked{0};
  mutable std::atomic<int> from{-1};
  std::atomic<int> moves{0};
  std::atomic<int> to{-1};
};

TEST_F(ProgressEngineTest, TheLoopLeavesTheCoreOfWhoItWaitsForIfThereIsOneForEachRank) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  const int cores = CPU_COUNT(&allowed);
  if (cores < 2) GTEST_SKIP() << "there is one core";
  for (const int ranks : {cores, cores + 1}) {
    SCOPED_TRACE(ranks);
    WaitsForItsCore poller;
    b_.noteRanksOnHost(ranks);
    {
      ProgressEngine::Access access(b_);
      b_.addPoller(poller);
    }
    const auto end = Clock::now() + 20s;
    for (std::uint64_t tag = 0; poller.moves == 0 && poller.asked < 5 && Clock::now() < end; ++tag) {
      int in = 0;
      const int value = 1;
      Flagged received;
      Flagged sent;
      recv(tag, in, received);
      send(tag, value, sent);
      while (!(received.done && sent.done) && Clock::now() < end) std::this_thread::sleep_for(1ms);
      ASSERT_TRUE(received.done && sent.done);
      if (ranks > cores && tag == 5) break;
    }
    {
      ProgressEngine::Access access(b_);
      b_.removePoller(poller);
    }
    EXPECT_EQ(poller.moves > 0, ranks == cores);
    if (ranks == cores) EXPECT_NE(poller.from, poller.to);
  }
}

TEST_F(ProgressEngineTest, DeferredTasksRunWithNothingHeld) {
  std::atomic<bool> ran{false};
  {
    ProgressEngine::Access access(a_);
    a_.defer([&] {
      ProgressEngine::Access again(a_);  // would deadlock if it were held
      ran = true;
    });
    EXPECT_FALSE(ran);
  }
  EXPECT_TRUE(ran);
}

TEST_F(ProgressEngineTest, WhoLeavesDoesSoOnceAfterAllTasksWithNothingHeld) {
  struct Leaving final : ProgressEngine::Leaver {
    ProgressEngine* engine = nullptr;
    const int* tasks = nullptr;
    int tasksBefore = 0;
    int times = 0;
    void leave() override {
      ProgressEngine::Access again(*engine);  // would deadlock if it were held
      tasksBefore = *tasks;
      ++times;
    }
  };
  int tasks = 0;
  std::vector<Leaving> leaving(3);
  {
    ProgressEngine::Access access(a_);
    for (Leaving& leaver : leaving) {
      leaver.engine = &a_;
      leaver.tasks = &tasks;
      a_.addLeaver(leaver);
      a_.defer([&] { ++tasks; });
    }
    EXPECT_EQ(leaving[0].times, 0);
  }
  { ProgressEngine::Access access(a_); }
  for (const Leaving& leaver : leaving) {
    EXPECT_EQ(leaver.times, 1);
    EXPECT_EQ(leaver.tasksBefore, 3);
  }
}

}  // namespace
}  // namespace farandole::transport
