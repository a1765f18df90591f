#include "pipeline/sparse/stage_thread.h"

#include <pthread.h>

#include <chrono>

namespace farandole::pipeline::sparse {

StageThread::~StageThread() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    isEnding_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StageThread::start(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    task_ = std::move(task);
  }
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { run(); });
  } else {
    changed_.notify_all();
  }
}

void StageThread::join(const std::function<void()>& meanwhile) {
  constexpr auto kBetween = std::chrono::milliseconds(50);
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kBetween, [this] { return !task_; })) {
    lock.unlock();
    meanwhile();
    lock.lock();
  }
}

void StageThread::run() {
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return task_ || isEnding_; });
    if (!task_) return;
    lock.unlock();
    task_();
    lock.lock();
    task_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace farandole::pipeline::sparse
