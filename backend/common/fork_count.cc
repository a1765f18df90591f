#include "backend/common/fork_count.h"

#include <pthread.h>

namespace farandole {

void ForkCount::begin() {
  static const int begun = pthread_atfork(nullptr, nullptr, [] { count_.fetch_add(1, std::memory_order_relaxed); });
  (void)begun;
}

}  // namespace farandole
