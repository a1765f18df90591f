#include "backend/collective/communicator.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/backend/collective/communicators.h"

namespace farandole::collective {
namespace {

using namespace std::chrono_literals;
using testing::Group;
using testing::TestOperation;

Program recvProgram(int peer, int& into) {
  Program program;
  program.recv(peer, &into, sizeof into);
  return program;
}

Program sendProgram(int peer, const int& value) {
  Program program;
  program.send(peer, &value, sizeof value);
  return program;
}

// As a message of a program's: it ends without the group.
std::shared_ptr<TestOperation> receiveAlone(const std::shared_ptr<Communicator>& communicator, int peer, int& into,
                                            std::uint32_t sequence) {
  auto operation = std::make_shared<TestOperation>(communicator);
  operation->setProgram(recvProgram(peer, into), sequence);
  operation->endAlone();
  transport::ProgressEngine::Access access(communicator->engine());
  operation->start();
  return operation;
}

// Of two ranks, the first one's receive, done: it has room for 8 bytes, and 4 came.
std::shared_ptr<TestOperation> receiveAnotherSize(Group& group) {
  std::int64_t in = 0;
  static constexpr int kValue = 3;  // it may be on its way for longer than this
  Program program;
  program.recv(1, &in, sizeof in);
  auto recv = TestOperation::launch(group[0], std::move(program), 1);
  auto send = TestOperation::launch(group[1], sendProgram(0, kValue), 1);
  EXPECT_TRUE(recv->wait(transport::Clock::now() + 10s));
  return recv;
}

TEST(Communicator, AbortEndsWhatIsPendingAndWhatComesLater) {
  Group group(2, 0);
  int in = 0;
  auto pending = TestOperation::launch(group[0], recvProgram(1, in), 1);
  std::thread other([&] {
    std::this_thread::sleep_for(50ms);
    group[0]->abort(Status::aborted("told to"));
  });
  EXPECT_TRUE(pending->wait(transport::Clock::now() + 10s));
  other.join();
  EXPECT_EQ(pending->status().code(), StatusCode::kAborted);
  EXPECT_EQ(pending->status().toString(), "test operation: told to");
  auto later = TestOperation::launch(group[0], recvProgram(1, in), 2);
  EXPECT_TRUE(later->isDone());
  EXPECT_EQ(later->status().code(), StatusCode::kAborted);
}

TEST(Communicator, AnAbortForAllEndsWhatOtherRanksOfTheHostWaitForAmongThemselves) {
  Group group(3, Group::kSharedMemory);
  int in = 0;
  auto waited = TestOperation::launch(group[0], recvProgram(2, in), 1);
  auto unwaited = TestOperation::launch(group[2], recvProgram(0, in), 1);
  std::atomic<bool> told{false};
  unwaited->whenDone([&] { told = true; });
  std::thread other([&] {
    std::this_thread::sleep_for(50ms);
    group[1]->abortAll(Status::aborted("told to"));
  });
  EXPECT_TRUE(waited->wait(transport::Clock::now() + 10s));
  other.join();
  for (int i = 0; i < 500 && !told; ++i) std::this_thread::sleep_for(10ms);
  ASSERT_TRUE(told);
  for (const auto& operation : {waited, unwaited}) {
    EXPECT_EQ(operation->status().toString(), "test operation: rank 1 (host host, pid 1) aborted the group: told to");
  }
  auto later = TestOperation::launch(group[2], recvProgram(0, in), 2);
  EXPECT_EQ(later->status().code(), StatusCode::kAborted);
}

TEST(Communicator, LeavingEndsNothingThatOtherRanksDoAmongThemselves) {
  Group group(3, Group::kSharedMemory);
  int in = 0;
  const int value = 3;
  auto pending = TestOperation::launch(group[0], recvProgram(2, in), 1);
  group[1]->abort(Status::aborted("was shut down"));
  EXPECT_FALSE(pending->wait(transport::Clock::now() + 100ms));
  auto send = TestOperation::launch(group[2], sendProgram(0, value), 1);
  EXPECT_TRUE(pending->wait(transport::Clock::now() + 10s));
  EXPECT_TRUE(pending->status().isOk()) << pending->status().toString();
  EXPECT_EQ(in, 3);
}

TEST(Communicator, ARankThatTheWatchHoldsForDeadEndsTheGroup) {
  Group group(2, 0);
  int in = 0;
  auto pending = TestOperation::launch(group[0], recvProgram(1, in), 1);
  EXPECT_NE(group[0]->describePending().find("test operation is pending"), std::string::npos);
  std::thread watch([&] {
    std::this_thread::sleep_for(50ms);
    group[0]->rankFailed(1, Status(StatusCode::kPeerFailed, "rank 1 failed"));
  });
  EXPECT_TRUE(pending->wait(transport::Clock::now() + 10s));
  watch.join();
  EXPECT_EQ(pending->status().toString(), "test operation: rank 1 failed");
  EXPECT_NE(group[0]->describePending().find("over"), std::string::npos);
}

class TestWatch final : public GroupWatch {
 public:
  void abort(const std::string& reason) override { reasons.push_back(reason); }
  void reportDeath(int rank, const std::string& reason) override { deaths.emplace_back(rank, reason); }
  void ask() override { ++questions; }
  bool hasAnswers() override { return answered; }
  void awaitAnswers() override {}
  std::string answers() override { return "rank 1 sleeps"; }

  std::vector<int> left() override { return leavers; }
  std::vector<int> departed() override { return gone; }

  std::vector<int> gone;
  std::vector<int> leavers;  // with the engine held, as what is told
  std::vector<std::pair<int, std::string>> deaths;
  std::vector<std::string> reasons;
  std::atomic<int> questions{0};
  std::atomic<bool> answered{false};
};

TEST(Communicator, ATimeoutTellsWhatTheOtherRanksAnswer) {
  Group group(2, 0);
  const auto watch = std::make_shared<TestWatch>();
  group[0]->setWatch(watch);
  int in = 0;
  auto unwaited = TestOperation::launch(group[0], recvProgram(1, in), 1, 20ms);
  std::atomic<bool> told{false};
  unwaited->whenDone([&] { told = true; });
  std::this_thread::sleep_for(800ms);
  EXPECT_EQ(watch->questions, 1);
  EXPECT_FALSE(told);
  watch->answered = true;
  for (int i = 0; i < 500 && !told; ++i) std::this_thread::sleep_for(10ms);
  ASSERT_TRUE(told);
  EXPECT_EQ(unwaited->status().toString(),
            "test operation: not done when its timeout came, waits for rank 1 (host host, pid 1); rank 1 sleeps");

  Group another(2, 0);
  another[0]->setWatch(watch);
  auto waited = TestOperation::launch(another[0], recvProgram(1, in), 1);
  EXPECT_FALSE(waited->wait(transport::Clock::now() + 20ms));
  another[0]->timeOut(*waited, 20ms);
  EXPECT_EQ(waited->status().toString(),
            "test operation: not done after its timeout of 20 ms, waits for rank 1 (host host, pid 1); rank 1 sleeps");
}

TEST(Communicator, ALossWaitsForTheWatchToSayWhy) {
  Group group(2, 0);
  group[0]->setWatch(std::make_shared<TestWatch>());
  int in = 0;
  auto pending = TestOperation::launch(group[0], recvProgram(1, in), 1);
  group.end(1);
  EXPECT_FALSE(pending->wait(transport::Clock::now() + 100ms));
  group[0]->rankFailed(1, Status::aborted("rank 1 gave up"));
  ASSERT_TRUE(pending->wait(transport::Clock::now() + 10s));
  EXPECT_EQ(pending->status().toString(), "test operation: rank 1 gave up");
}

TEST(Communicator, ALossThatTheWatchDoesNotExplainIsTheReasonInTheEnd) {
  Group group(2, 0);
  const auto watch = std::make_shared<TestWatch>();
  group[0]->setWatch(watch);
  int in = 0;
  auto pending = TestOperation::launch(group[0], recvProgram(1, in), 1);
  group.end(1);
  ASSERT_TRUE(pending->wait(transport::Clock::now() + 10s));
  EXPECT_EQ(pending->status().code(), StatusCode::kPeerFailed);
  EXPECT_NE(pending->status().toString().find("rank 1 (host host, pid 1)"), std::string::npos);
  EXPECT_TRUE(watch->reasons.empty());
}

TEST(Communicator, ALossOfARankThatHasLeftIsThat) {
  Group group(2, 0);
  const auto watch = std::make_shared<TestWatch>();
  watch->gone = {1};
  group[0]->setWatch(watch);
  int in = 0;
  auto pending = TestOperation::launch(group[0], recvProgram(1, in), 1);
  group.end(1);
  ASSERT_TRUE(pending->wait(transport::Clock::now() + 10s));
  EXPECT_EQ(
      pending->status().toString(),
      "test operation: rank 1 (host host, pid 1) is gone: its process has left: it destroyed its groups, or exited");
}

// Its process goes on, and its connections with it.
TEST(Communicator, WhoWaitsForARankThatHasLeftTheGroupHearsOfItAndLosesNothing) {
  for (const int hosts : {1, 2}) {
    Group group(2, hosts == 1 ? Group::kSharedMemory : 0);
    int in = 0;
    const int value = 7;
    auto pending = receiveAlone(group[0], 1, in, 2);
    auto any = receiveAlone(group[0], kAnySource, in, 3);
    auto sent = TestOperation::launch(group[1], sendProgram(0, value), 1);
    if (hosts == 1) {
      group[1]->abort(Status::aborted("it was destroyed"));
    } else {
      const auto watch = std::make_shared<TestWatch>();
      watch->leavers = {1};
      group[0]->setWatch(watch);
    }
    ASSERT_TRUE(pending->wait(transport::Clock::now() + 20s));
    const std::string why =
        hosts == 1 ? "it has left or given up the group: it was destroyed" : "it has left the group";
    EXPECT_EQ(pending->status().toString(), "test operation: rank 1 (host host, pid 1) is gone: " + why);
    ASSERT_TRUE(any->wait(transport::Clock::now() + 1s));
    EXPECT_FALSE(any->status());
    int early = 0;
    auto arrived = receiveAlone(group[0], 1, early, 1);
    ASSERT_TRUE(arrived->wait(transport::Clock::now() + 1s));
    EXPECT_TRUE(arrived->status()) << arrived->status().toString();
    EXPECT_EQ(early, 7);
    auto late = receiveAlone(group[0], 1, in, 4);
    ASSERT_TRUE(late->wait(transport::Clock::now() + 2s));
    EXPECT_NE(late->status().toString().find(why), std::string::npos) << late->status().toString();
  }
}

TEST(Communicator, ACollectiveThatTimesOutEndsTheGroup) {
  Group group(2, 0);
  int in = 0;
  auto pending = TestOperation::launch(group[0], recvProgram(1, in), 1);
  auto another = TestOperation::launch(group[0], recvProgram(1, in), 2);
  EXPECT_FALSE(pending->wait(transport::Clock::now() + 20ms));
  group[0]->timeOut(*pending, 20ms);
  EXPECT_EQ(pending->status().code(), StatusCode::kTimeout);
  ASSERT_TRUE(another->isDone());
  EXPECT_EQ(another->status().code(), StatusCode::kTimeout);
  EXPECT_EQ(TestOperation::launch(group[0], recvProgram(1, in), 3)->status().code(), StatusCode::kTimeout);
}

TEST(Communicator, WhyARankGaveUpIsToldThoughItHasLeftSince) {
  Group group(2, Group::kSharedMemory);
  const auto launchBarrier = [&](int rank, std::uint32_t sequence) {
    Program program;
    barrier(program, group[rank]->topology());
    return TestOperation::launch(group[rank], std::move(program), sequence);
  };
  auto alone = launchBarrier(1, 1);
  group[1]->timeOut(*alone, 20ms);
  alone.reset();
  group.end(1);
  int in = 0;
  auto waiting = receiveAlone(group[0], 1, in, 1);
  ASSERT_TRUE(waiting->wait(transport::Clock::now() + 10s));
  EXPECT_EQ(waiting->status().code(), StatusCode::kPeerLeft) << waiting->status().toString();

  launchBarrier(0, 2);  // the other one had come to it
  auto late = launchBarrier(0, 3);
  ASSERT_TRUE(late->wait(transport::Clock::now() + 10s));
  EXPECT_NE(late->status().toString().find("not done after its timeout of 20 ms"), std::string::npos)
      << late->status().toString();
}

TEST(Communicator, TheWatchIsToldWhyARankGaveUpAndNotOfWhatItTellsItself) {
  Group group(2, 0);
  const auto watch = std::make_shared<TestWatch>();
  group[0]->setWatch(watch);
  receiveAnotherSize(group);
  const auto reasons = [&] {
    transport::ProgressEngine::Access access(group[0]->engine());
    return watch->reasons;
  };
  EXPECT_EQ(reasons(), std::vector<std::string>{"rank 1 (host host, pid 1) sent 4 bytes, the buffer here has 8"});

  Group dying(2, 0);
  dying[0]->setWatch(watch);
  int never = 0;
  auto pending = TestOperation::launch(dying[0], recvProgram(1, never), 1);
  dying[0]->rankFailed(1, Status(StatusCode::kPeerFailed, "rank 1 failed"));
  EXPECT_TRUE(pending->isDone());
  EXPECT_EQ(reasons().size(), 1u);
}

TEST(Communicator, AnOperationThatNobodyWaitsForIsEndedAtItsDeadline) {
  Group group(2, 0);
  int in = 0;
  auto pending = TestOperation::launch(group[0], recvProgram(1, in), 1, 20ms);
  std::atomic<bool> told{false};
  pending->whenDone([&] { told = true; });
  for (int i = 0; i < 500 && !told; ++i) std::this_thread::sleep_for(10ms);
  EXPECT_TRUE(told);
  EXPECT_EQ(pending->status().code(), StatusCode::kTimeout);
}

TEST(Communicator, AMessageOfAnotherSizeFailsTheReceiverWithBothSizes) {
  Group group(2, 1024);
  const auto recv = receiveAnotherSize(group);
  EXPECT_EQ(recv->status().toString(), "test operation: rank 1 (host host, pid 1) sent 4 bytes, the buffer here has 8");
}

TEST(Communicator, OperationsOutliveTheirHandles) {
  int in = 0;
  const int value = 8;
  std::atomic<bool> done{false};
  Group group(2, 0);
  TestOperation::launch(group[0], recvProgram(1, in), 1)->whenDone([&] { done = true; });
  TestOperation::launch(group[1], sendProgram(0, value), 1);
  for (int i = 0; i < 1000 && !done; ++i) std::this_thread::sleep_for(5ms);
  EXPECT_TRUE(done);
  EXPECT_EQ(in, 8);
}

}  // namespace
}  // namespace farandole::collective
