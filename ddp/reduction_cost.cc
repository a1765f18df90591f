#include "ddp/reduction_cost.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace farandole::ddp {

Result<ReductionCost> ReductionCost::fromMeasured(std::vector<std::pair<double, double>> points) {
  if (points.empty()) return Status::invalidArgument("points are empty: expected at least one size");
  for (std::size_t i = 0; i < points.size(); ++i) {
    const auto [bytes, seconds] = points[i];
    if (!(bytes >= 0) || !(seconds >= 0) || !std::isfinite(seconds) || (i > 0 && bytes <= points[i - 1].first)) {
      return Status::invalidArgument("points[" + std::to_string(i) + "] is " + std::to_string(bytes) + " bytes, " +
                                     std::to_string(seconds) + " s: expected ascending bytes, and 0 s or more");
    }
    if (i > 0) points[i].second = std::max(seconds, points[i - 1].second);
  }
  return ReductionCost(std::move(points));
}

double ReductionCost::seconds(double bytes) const {
  if (bytes <= points_.front().first || points_.size() == 1) return points_.front().second;
  auto after = std::lower_bound(points_.begin(), points_.end(), bytes,
                                [](const auto& point, double value) { return point.first < value; });
  if (after == points_.end()) --after;
  const auto& [toBytes, toSeconds] = *after;
  const auto& [fromBytes, fromSeconds] = *(after - 1);
  return fromSeconds + (toSeconds - fromSeconds) * (bytes - fromBytes) / (toBytes - fromBytes);
}

double ReductionCost::bytesPerSecond() const {
  const double more = points_.back().second - points_.front().second;
  return more > 0 ? (points_.back().first - points_.front().first) / more : std::numeric_limits<double>::infinity();
}

}  // namespace farandole::ddp
