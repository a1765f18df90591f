#pragma once

#include "backend/transport/nccl/cuda_api.h"
#include "backend/transport/nccl/nccl_api.h"

namespace farandole::transport {

// What a device is reached by: torch's own libraries, or in tests a simulator.
struct DeviceRuntime {
  CudaApi cuda;
  NcclApi nccl;

  // The process's, loaded once; kUnavailable says what is missing.
  static Result<const DeviceRuntime*> ofProcess();
};

}  // namespace farandole::transport
