#include "pipeline/sparse/stage_thread.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <stdexcept>

namespace farandole::pipeline::sparse {
namespace {

const auto kNothing = [] {};

TEST(StageThread, RunsTaskAfterTaskOnOneNamedThread) {
  StageThread thread("farandole-load-and-more");
  std::thread::id first;
  std::string name(16, '\0');
  thread.start([&] {
    first = std::this_thread::get_id();
    pthread_getname_np(pthread_self(), name.data(), name.size());
  });
  thread.join(kNothing);
  EXPECT_STREQ(name.c_str(), "farandole-load-");
  EXPECT_NE(first, std::this_thread::get_id());
  int runs = 0;
  for (int task = 0; task < 200; ++task) {
    thread.start([&] {
      ++runs;
      EXPECT_EQ(std::this_thread::get_id(), first);
    });
    thread.join(kNothing);
  }
  EXPECT_EQ(runs, 200);
}

TEST(StageThread, EndsAfterTheTaskUnderWay) {
  std::atomic<bool> isDone = false;
  {
    StageThread thread("t");
    thread.start([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      isDone = true;
    });
  }
  EXPECT_TRUE(isDone);
}

TEST(StageThread, ThatNeverHadATaskJoinsAtOnce) {
  StageThread thread("t");
  thread.join([] { FAIL() << "waited"; });
}

TEST(StageThread, LeavesAJoinThatIsInterruptedAndCanBeJoinedAgain) {
  StageThread thread("t");
  std::atomic<bool> mayEnd = false;
  thread.start([&] {
    while (!mayEnd) std::this_thread::yield();
  });
  EXPECT_THROW(thread.join([] { throw std::runtime_error("interrupted"); }), std::runtime_error);
  mayEnd = true;
  thread.join(kNothing);
}

}  // namespace
}  // namespace farandole::pipeline::sparse
