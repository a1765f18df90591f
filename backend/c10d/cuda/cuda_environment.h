#pragma once

#include "backend/transport/nccl/device_runtime.h"
#include "backend/transport/ucx/ucx_config.h"

namespace farandole::backend {

// Where the CUDA half finds its libraries and the caller's streams.
struct CudaEnvironment {
  const transport::DeviceRuntime* runtime;
  // The stream that is current on the calling thread.
  cudaStream_t (*currentStream)(int device);
  // What UCX must know to carry messages.
  transport::UcxMemory messageMemory = transport::UcxMemory::kCuda;

  // torch's, unless a test has put in its own.
  static Result<CudaEnvironment> current();
  // For tests, before anything else is called; null undoes it.
  static void replace(const CudaEnvironment* environment);
};

}  // namespace farandole::backend
