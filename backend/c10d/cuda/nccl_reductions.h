#pragma once

#include <optional>

#include "backend/c10d/collective_calls.h"
#include "backend/transport/nccl/nccl_communicator.h"

namespace farandole::backend {

// How NCCL is told what to reduce.
struct NcclReduction {
  ncclDataType_t dtype;
  std::size_t elementBytes;      // of what is counted: a complex number counts as two
  ncclRedOp_t op;                // unless there is a factor
  std::optional<double> factor;  // PREMUL_SUM: what this rank's data is multiplied by
};

// Throws an error that names operation, reduction and dtype where NCCL has none. bool is reduced as bytes that are 0 or
// 1, a sum of them being the maximum; complex numbers as pairs of real ones.
NcclReduction ncclReductionFor(const char* operation, const Reducing& reducing);

}  // namespace farandole::backend
