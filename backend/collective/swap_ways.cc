#include "backend/collective/swap_ways.h"

#include <algorithm>
#include <bit>

#include "backend/collective/algorithm_table.h"

namespace farandole::collective {

bool SwapWays::passes(HostTurn turn, std::size_t bytes) {
  const std::size_t size = std::min<std::size_t>(std::bit_width(bytes / kSmallestRead), kSizes - 1);
  const std::uint16_t bit = std::uint16_t{1} << size;
  const bool passes = (host_.toldBefore(turn) & bit) != 0;
  if (!measures()) return passes;
  told_ = ways_[size].next() ? told_ | bit : told_ & ~bit;
  host_.tellForLater(turn, told_);
  size_ = size;
  bytes_ = bytes;
  started_ = clock_.now();
  return passes_ = passes;
}

void SwapWays::end() { ways_[size_].note(passes_, clock_.now() - started_, bytes_); }

}  // namespace farandole::collective
