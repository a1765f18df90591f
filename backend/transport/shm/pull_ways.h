#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "backend/common/fastest_way.h"

namespace farandole::transport {

// Whether a receiver reads large messages at once, or waits for their sender to pass them through the ring: by size,
// whichever is faster at present. Two processes that send to each other must do the same, since who reads does not
// help the other one: so one of them measures what it receives, and tells. The other one measures for itself what comes
// while it is told nothing.
class PullWays {
 public:
  static constexpr std::size_t kSizes = 13;  // from kSmallest on, each twice the one before
  static constexpr std::size_t kSmallest = 8 << 10;
  // In memory that both see; the one that leads writes.
  using Told = std::array<std::atomic<std::uint32_t>, kSizes>;

  // Of the message that comes next.
  bool readsAtOnce(std::size_t bytes, Told& told, bool leads);
  // What one of them has cost.
  void note(std::size_t bytes, bool wasRead, std::uint64_t cost);

  // So many come while nothing is told before it counts no more.
  static constexpr std::uint32_t kSilence = 8;

 private:
  struct Size {
    FastestWay ways;  // 0: to read; 1: to let it pass
    std::uint32_t heard = 0;
    std::uint32_t silence = kSilence;
  };

  static std::size_t sizeOf(std::size_t bytes);

  std::array<Size, kSizes> sizes_;
};

}  // namespace farandole::transport
