#pragma once

#include "backend/transport/nccl/cuda_api.h"
#include "backend/transport/nccl/nccl_api.h"

namespace farandole::testing {

// The tables whose functions go to the process's simulation: each call is counted and may be one that is to fail.
// Without one, all fail.
transport::NcclApi simulatedNccl(bool newerFunctions);
transport::CudaApi simulatedCuda();

}  // namespace farandole::testing
