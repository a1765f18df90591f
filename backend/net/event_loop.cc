#include "backend/net/event_loop.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>

namespace farandole::net {
namespace {

// Signals belong to the user's threads: a thread that is made meanwhile inherits a mask that blocks them all.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

EventLoop::EventLoop(const std::string& threadName) : work_(boost::asio::make_work_guard(context_)), pid_(getpid()) {
  {
    SignalsBlocked blocked;
    thread_ = std::thread([this] { context_.run(); });
  }
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
