#include "backend/collective/swap_ways.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "backend/collective/algorithm_table.h"

namespace farandole::collective {
namespace {

constexpr unsigned kBase = FastestWay::kMostWays;

constexpr unsigned unitOf(std::size_t size) { return size == 0 ? 1 : kBase * unitOf(size - 1); }

}  // namespace

SwapWays::SwapWays(HostSegment& host) : host_(host), firstWay_(host.reading() == transport::Reading::kCheap ? 0 : 1) {
  static_assert(unitOf(kSizes) <= std::numeric_limits<decltype(told_)>::max());
  ways_.fill(FastestWay(FastestWay::kMostWays - firstWay_));
}

SwapWay SwapWays::inTurn(HostTurn turn, std::size_t bytes) {
  size_ = std::min<std::size_t>(std::bit_width(bytes / kSmallestRead), kSizes - 1);
  const unsigned unit = unitOf(size_);
  way_ = host_.toldBefore(turn) / unit % kBase;
  if (host_.index() == 0) {
    FastestWay& ways = ways_[size_];
    measures_ = ways.isTrying();
    told_ = static_cast<std::uint16_t>(told_ + (ways.next() - told_ / unit % kBase) * unit);
    host_.tellForLater(turn, told_);
    bytes_ = bytes;
    if (measures_) started_ = clock_.now();
  }
  return static_cast<SwapWay>(firstWay_ + way_);
}

void SwapWays::end() { ways_[size_].note(way_, clock_.now() - started_, bytes_); }

}  // namespace farandole::collective
