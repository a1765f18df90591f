#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/common/status.h"
#include "ddp/bucket_layout.h"
#include "ddp/reduction_cost.h"

namespace farandole::ddp {

// What the choice of a bucket size goes by. Times are seconds from the first gradient of a backward on.
struct TuningFacts {
  std::vector<ParameterSpec> parameters;  // in registration order
  std::vector<int> gradBytes;             // by parameter: of an element
  std::vector<double> ready;              // by parameter: when its gradient is there
  LayoutOptions layout;                   // its bucket size is what there is now
  double end = 0;                         // when the backward ends, where that is after the last gradient
  double start = 0;                       // that the backward is held up by the start of a reduction
};

struct Prediction {
  int64_t bucketSize = 0;
  int buckets = 0;
  double exposed = 0;  // seconds that a backward and its reductions take beyond the backward alone
};

struct TuningChoice {
  Prediction now;
  Prediction best;
  bool isWorthwhile = false;  // to lay buckets out anew
  double backward = 0;        // seconds from the first gradient to the end
};

// How a backward with these buckets would end: each is reduced when its gradients are there and the one before it, in
// that order, is done. What starts them comes out of the backward.
double exposedBy(const Layout& layout, const TuningFacts& facts, const ReductionCost& cost);

// The bucket size whose reductions end first; of equal ones the largest.
Result<TuningChoice> chooseBucketSize(const TuningFacts& facts, const ReductionCost& cost);

// The sizes it chooses from, ascending: a constant factor apart, up to one bucket for all; and those that leave a few
// parameters, whose gradients come last, to a small bucket after one or several equal ones.
std::vector<int64_t> candidateSizes(const TuningFacts& facts);

}  // namespace farandole::ddp
