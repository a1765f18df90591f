#pragma once

#include <atomic>
#include <cstdint>

namespace farandole::backend {

// What a group has been asked to do so far.
struct CallCounts {
  std::atomic<std::uint32_t> collectives{0};
  std::atomic<std::uint64_t> pointToPoint{0};
};

}  // namespace farandole::backend
