#include "backend/transport/shm/pull_ways.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace farandole::transport {

std::size_t PullWays::sizeOf(std::size_t bytes) {
  return std::min<std::size_t>(std::bit_width(bytes / (2 * kSmallest)), kSizes - 1);
}

// What is told is a number that counts up, so that it shows that something is, and the way in its lowest bit.
bool PullWays::readsAtOnce(std::size_t bytes, Told& told, bool leads) {
  Size& size = sizes_[sizeOf(bytes)];
  std::atomic<std::uint32_t>& word = told[sizeOf(bytes)];
  if (leads) {
    const unsigned way = size.ways.next();
    word.store(((word.load(std::memory_order_relaxed) >> 1) + 1) << 1 | way, std::memory_order_relaxed);
    return way == 0;
  }
  const std::uint32_t now = word.load(std::memory_order_relaxed);
  size.silence = now != std::exchange(size.heard, now) ? 0 : size.silence + 1;
  return size.silence < kSilence ? (now & 1) == 0 : size.ways.next() == 0;
}

void PullWays::note(std::size_t bytes, bool wasRead, std::uint64_t cost) {
  sizes_[sizeOf(bytes)].ways.note(wasRead ? 0 : 1, cost, bytes);
}

}  // namespace farandole::transport
