#include "backend/c10d/cuda/cuda_environment.h"

#include <c10/cuda/CUDAStream.h>

#include <atomic>

namespace farandole::backend {
namespace {

std::atomic<const CudaEnvironment*> replacement{nullptr};

cudaStream_t currentTorchStream(int device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

}  // namespace

Result<CudaEnvironment> CudaEnvironment::current() {
  if (const CudaEnvironment* const replaced = replacement.load()) return *replaced;
  const auto runtime = transport::DeviceRuntime::ofProcess();
  if (!runtime) return runtime.status();
  return CudaEnvironment{*runtime, &currentTorchStream};
}

void CudaEnvironment::replace(const CudaEnvironment* environment) { replacement = environment; }

}  // namespace farandole::backend
