#include "backend/transport/inline_mutex.h"

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

namespace farandole::transport {
namespace {

TEST(InlineMutex, OneAtATimeHoldsItAndNobodyWhoSleepsForItIsForgotten) {
  constexpr int kThreads = 8;
  constexpr int kRounds = 20'000;
  InlineMutex mutex;
  long count = 0;  // not atomic: two holders at once would lose some
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < kRounds; ++round) {
        if (t % 2 == 0 && mutex.try_lock()) {
          ++count;
          mutex.unlock();
        } else {
          std::lock_guard lock(mutex);
          ++count;
          // Now and then for so long that the others go to sleep.
          if (round % 4000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(count, long{kThreads} * kRounds);
}

TEST(InlineMutex, IsNotTakenByTryingWhileItIsHeld) {
  InlineMutex mutex;
  ASSERT_TRUE(mutex.try_lock());
  EXPECT_FALSE(mutex.try_lock());
  mutex.unlock();
  EXPECT_TRUE(mutex.try_lock());
  mutex.unlock();
}

}  // namespace
}  // namespace farandole::transport
