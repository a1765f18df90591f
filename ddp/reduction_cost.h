#pragma once

#include <utility>
#include <vector>

#include "backend/common/status.h"

namespace farandole::ddp {

// How long a reduction of so many bytes takes, from measured sizes: on a line between
// two of them, on the line of the last two beyond, and below the first as that. More
// bytes never take less. Immutable.
class ReductionCost {
 public:
  // (bytes, seconds), with bytes ascending.
  static Result<ReductionCost> fromMeasured(std::vector<std::pair<double, double>> points);

  double seconds(double bytes) const;

  // Of the smallest size; and what more bytes take beyond it, up to the largest.
  double latency() const { return points_.front().second; }
  double bytesPerSecond() const;  // infinite where larger sizes take no longer

 private:
  explicit ReductionCost(std::vector<std::pair<double, double>> points) : points_(std::move(points)) {}

  std::vector<std::pair<double, double>> points_;
};

}  // namespace farandole::ddp
