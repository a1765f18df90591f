#include "backend/net/fork_guard.h"

#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace farandole::net {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<int> descriptors;
};

Registry& registry() {
  static auto* const instance = [] {
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     for (const int descriptor : registry().descriptors) ::close(descriptor);
                     registry().descriptors.clear();
                     registry().mutex.unlock();
                   });
    return new Registry;  // outlives static destructors
  }();
  return *instance;
}

int remember(Registry& guarded, int descriptor) {
  if (descriptor >= 0) guarded.descriptors.push_back(descriptor);
  return descriptor;
}

}  // namespace

int openGuarded(int domain) {
  std::lock_guard lock(registry().mutex);
  return remember(registry(), ::socket(domain, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
}

int acceptGuarded(int listener) {
  std::lock_guard lock(registry().mutex);
  return remember(registry(), ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

std::mutex& guardMutex() { return registry().mutex; }

void forgetGuarded(int descriptor) {
  auto& descriptors = registry().descriptors;
  descriptors.erase(std::remove(descriptors.begin(), descriptors.end(), descriptor), descriptors.end());
}

}  // namespace farandole::net
