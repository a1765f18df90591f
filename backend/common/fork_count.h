#pragma once

#include <atomic>
#include <cstdint>

namespace farandole {

// How many forks lie between the process that asked first and this one: in a forked child it is another number than in
// its parent. Costs a load, where getpid() costs a system call.
class ForkCount {
 public:
  // Before the first fork that is to count.
  static void begin();
  static std::uint32_t now() { return count_.load(std::memory_order_relaxed); }

 private:
  static inline std::atomic<std::uint32_t> count_{0};
};

}  // namespace farandole
