#include "backend/net/event_loop.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>

namespace farandole::net {

EventLoop::EventLoop(const std::string& threadName) : work_(boost::asio::make_work_guard(context_)), pid_(getpid()) {
  // Signals belong to the user's threads: this one inherits a mask that blocks them all.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { context_.run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), threadName.substr(0, 15).c_str());
}

void EventLoop::stop() {
  if (!thread_.joinable()) return;
  if (getpid() != pid_) {
    thread_.detach();
    return;
  }
  context_.stop();
  thread_.join();
}

}  // namespace farandole::net
