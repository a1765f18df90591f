#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "ddp/model_buffers.h"

namespace farandole::ddp {

// What to look for in the gradients of a bucket before they are reduced, when it can still be told whose they are.
struct GradCheckOptions {
  bool nan = false;    // NaN and Inf
  double largest = 0;  // the largest 2-norm of a parameter's gradient; 0 looks for none
  bool isEnabled() const { return nan || largest > 0; }
};

// The first parameter of the bucket whose gradient is not as it should be, and what is
// wrong; empty when all are well. One pass over the bucket, more only where it finds something.
std::string troubleIn(const ModelBuffers& buffers, int bucket, const GradCheckOptions& options);

}  // namespace farandole::ddp
