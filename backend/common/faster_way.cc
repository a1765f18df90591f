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
  if (place < pause_ + 2 * kTried) return way_;  // to be compared as it is now: before, all memory may have been new
  const std::uint64_t other = least(!way_);
  const std::uint64_t usual = least(way_);
  constexpr std::uint64_t kWorthIt = 16;  // the part by which it has to be faster
  const bool isFaster = other < usual - usual / kWorthIt;
  const bool isFarSlower = other > usual + usual / 4;
  pause_ = isFaster ? kFirstPause : std::min((isFarSlower ? 16 : 4) * pause_, kLongestPause);
  place_ = 1;
  return way_ = way_ != isFaster;
}

void FasterWay::note(bool way, std::uint64_t cost, std::uint64_t bytes) {
  costs_[way][noted_[way]++ % kKept] = cost * kUnit / bytes;
}

std::uint64_t FasterWay::least(bool way) const { return *std::ranges::min_element(costs_[way]); }

}  // namespace farandole
