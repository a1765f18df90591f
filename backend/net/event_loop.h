#pragma once

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <string>
#include <thread>
#include <utility>

namespace farandole::net {

// One io_context and the one named thread that runs it. Handlers run there and
// nowhere else; inLoop() lets them assert it.
class EventLoop {
 public:
  explicit EventLoop(const std::string& threadName);
  ~EventLoop() { stop(); }
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  boost::asio::io_context& context() { return context_; }
  bool inLoop() const { return std::this_thread::get_id() == thread_.get_id(); }

  // Any thread.
  template <typename Handler>
  void post(Handler handler) {
    boost::asio::post(context_, std::move(handler));
  }

  // Ends the thread after the handler that is running; what is queued is dropped.
  // Not from the loop. In a forked child, where the thread does not exist, it
  // only lets go of it.
  void stop();

 private:
  boost::asio::io_context context_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  const int pid_;
  std::thread thread_;
};

}  // namespace farandole::net
