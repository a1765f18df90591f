#include "backend/c10d/cuda/cuda_environment.h"

#include <c10/cuda/CUDAFunctions.h>
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
  static const transport::DeviceRuntime own = [&] {
    transport::DeviceRuntime copy = **runtime;
    // A thread's first device is 0: going back to it would make a context there, in every process.
    copy.cuda.restoreDevice = [](int device) {
      return c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(device));
    };
    return copy;
  }();
  return CudaEnvironment{&own, &currentTorchStream};
}

void CudaEnvironment::replace(const CudaEnvironment* environment) { replacement = environment; }

}  // namespace farandole::backend
