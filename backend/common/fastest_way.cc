#include "backend/common/fastest_way.h"

#include <algorithm>
#include <cassert>
#include <limits>

namespace farandole {

FastestWay::FastestWay(unsigned ways) : numWays_(ways) {
  assert(2 <= ways && ways <= kMostWays);
  for (auto& costs : costs_) costs.fill(std::numeric_limits<std::uint64_t>::max());
}

unsigned FastestWay::next() {
  const unsigned place = place_++;
  if (place < pause_) return way_;
  const auto after = [&](unsigned steps) { return (way_ + steps) % numWays_; };
  // The usual one last: it is compared as it is now; before, all memory may have been new.
  if (const unsigned tried = (place - pause_) / kTried; tried < numWays_) return after(tried + 1);
  unsigned best = after(1);
  for (unsigned i = 2; i < numWays_; ++i) {
    if (least(after(i)) < least(best)) best = after(i);
  }
  const std::uint64_t other = least(best);
  const std::uint64_t usual = least(way_);
  constexpr std::uint64_t kWorthIt = 16;  // the part by which it has to be faster
  const bool isFaster = other < usual - usual / kWorthIt;
  const bool isFarSlower = other > usual + usual / 4;
  pause_ = isFaster ? kFirstPause : std::min((isFarSlower ? 16 : 4) * pause_, kLongestPause);
  place_ = 1;
  return way_ = isFaster ? best : way_;
}

void FastestWay::note(unsigned way, std::uint64_t cost, std::uint64_t bytes) {
  costs_[way][noted_[way]++ % kKept] = cost * kUnit / bytes;
}

std::uint64_t FastestWay::least(unsigned way) const { return *std::ranges::min_element(costs_[way]); }

}  // namespace farandole
