#pragma once

#include <c10/core/ScalarType.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend/collective/algorithms.h"

namespace farandole::backend {

// The reduction for a dtype; throws an error that names both where there is
// none. half and bfloat16 are accumulated in float and rounded once.
collective::Reduction reductionFor(const ::c10d::ReduceOp& op, at::ScalarType dtype);

}  // namespace farandole::backend
