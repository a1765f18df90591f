#pragma once

#include "backend/c10d/collective_calls.h"

namespace farandole::backend {

// Throws an error that names operation, reduction and dtype where NCCL has none. bool is reduced as bytes that are 0 or
// 1, a sum of them being the maximum; complex numbers as pairs of real ones.
NcclReduction ncclReductionFor(const char* operation, const ::c10d::ReduceOp& reduction, at::ScalarType type);

}  // namespace farandole::backend
