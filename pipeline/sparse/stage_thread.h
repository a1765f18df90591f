#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace farandole::pipeline::sparse {

// A named thread for one task at a time, made for the first one. All methods belong to one thread, its owner's; the end
// waits for the task under way.
class StageThread {
 public:
  explicit StageThread(std::string name) : name_(std::move(name)) {}
  ~StageThread();
  StageThread(const StageThread&) = delete;
  StageThread& operator=(const StageThread&) = delete;

  // The task must not throw, and the one before must have been joined.
  void start(std::function<void()> task);

  // Waits for the task, and calls `meanwhile` every 50 ms; what that throws leaves the task under way.
  void join(const std::function<void()>& meanwhile);

 private:
  void run();

  std::string name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> task_;  // under mutex_; empty when there is none
  bool isEnding_ = false;       // under mutex_
  std::thread thread_;
};

}  // namespace farandole::pipeline::sparse
