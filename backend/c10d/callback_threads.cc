#include "backend/c10d/callback_threads.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace farandole::backend {
namespace {

constexpr std::chrono::seconds kIdleTime{10};

class Pool {
 public:
  // Outlives static destructors; a forked child, which has none of the threads, gets its own.
  static Pool& instance() {
    static std::atomic<Pool*> current{nullptr};
    Pool* pool = current.load();
    while (pool == nullptr || pool->pid_ != getpid()) {
      auto* const made = new Pool;
      if (current.compare_exchange_strong(pool, made)) return *made;
      delete made;
    }
    return *pool;
  }

  void run(std::function<void()> task, bool isBeforeExit) {
    std::lock_guard lock(mutex_);
    if (isBeforeExit) ++numBeforeExit_;
    tasks_.push_back({std::move(task), isBeforeExit});
    if (numIdle_ >= tasks_.size()) {
      wake_.notify_one();
    } else {
      std::thread([this] { work(); }).detach();
    }
  }

  bool waitBeforeExit(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    return noneBeforeExit_.wait_for(lock, timeout, [&] { return numBeforeExit_ == 0; });
  }

 private:
  struct Task {
    std::function<void()> run;
    bool isBeforeExit;
  };

  void work() {
    pthread_setname_np(pthread_self(), "farandole-call");
    std::unique_lock lock(mutex_);
    while (true) {
      ++numIdle_;
      wake_.wait_for(lock, kIdleTime, [&] { return !tasks_.empty(); });
      --numIdle_;
      if (tasks_.empty()) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      runGuarded(task.run);
      task.run = nullptr;  // what it holds is let go of without the lock
      lock.lock();
      if (task.isBeforeExit && --numBeforeExit_ == 0) noneBeforeExit_.notify_all();
    }
  }

  static void runGuarded(const std::function<void()>& task) {
    try {
      task();
    } catch (const std::exception& error) {
      TORCH_WARN("farandole: a callback raised: ", error.what());
    } catch (...) {
      TORCH_WARN("farandole: a callback raised something that is no std::exception");
    }
  }

  const int pid_ = getpid();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable noneBeforeExit_;
  std::deque<Task> tasks_;
  std::size_t numIdle_ = 0;
  std::size_t numBeforeExit_ = 0;
};

}  // namespace

void runOnCallbackThread(std::function<void()> task) { Pool::instance().run(std::move(task), false); }

void runBeforeExit(std::function<void()> task) { Pool::instance().run(std::move(task), true); }

bool waitBeforeExit(std::chrono::milliseconds timeout) { return Pool::instance().waitBeforeExit(timeout); }

}  // namespace farandole::backend
