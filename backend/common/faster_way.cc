#include "backend/common/faster_way.h"

#include <algorithm>
#include <limits>

namespace farandole {

FasterWay::FasterWay() {
  for (auto& costs : costs_) costs.fill(std::numeric_limits<std::uint64_t>::max());
}

bool FasterWay::next() {
  const unsigned place = place_++;
  if (place < pause_) return way_;
  if (place < pause_ + kTried) return !way_;
  if (place == pause_ + kTried) return way_;  // the last that was tried is still under way
  const std::uint64_t other = least(!way_);
  constexpr std::uint64_t kWorthIt = 16;  // the part by which it has to be faster
  const bool isFaster = other < least(way_) - least(way_) / kWorthIt;
  pause_ = isFaster ? kFirstPause : std::min(4 * pause_, kLongestPause);
  place_ = 1;
  return way_ = way_ != isFaster;
}

void FasterWay::note(bool way, std::uint64_t cost, std::uint64_t bytes) {
  costs_[way][noted_[way]++ % kKept] = cost * kUnit / bytes;
}

std::uint64_t FasterWay::least(bool way) const { return *std::ranges::min_element(costs_[way]); }

}  // namespace farandole
