// Memory of NCCL's for torch's pools, and what a pool has.
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <algorithm>

#include "backend/c10d/cuda/cuda_environment.h"
#include "backend/c10d/cuda_group.h"
#include "backend/c10d/errors.h"

namespace farandole::backend {
namespace {

void* allocate(std::size_t bytes, int device, cudaStream_t) {
  const auto environment = CudaEnvironment::current();
  throwIfError(environment.status());
  const transport::DeviceRuntime& runtime = *environment->runtime;
  const transport::DeviceScope scope(runtime.cuda, device);
  throwIfError(scope.status());
  void* memory = nullptr;
  throwIfError(
      runtime.nccl.check(runtime.nccl.memAlloc(&memory, bytes), "ncclMemAlloc of " + std::to_string(bytes) + " bytes"));
  return memory;
}

// Called where nothing may throw.
void release(void* memory, std::size_t, int device, cudaStream_t) {
  const auto environment = CudaEnvironment::current();
  if (!environment) return;
  const transport::DeviceRuntime& runtime = *environment->runtime;
  const transport::DeviceScope scope(runtime.cuda, device);
  const Status freed = runtime.nccl.check(runtime.nccl.memFree(memory), "ncclMemFree");
  if (!freed) TORCH_WARN("farandole: memory of a pool stays allocated: ", freed.toString());
}

}  // namespace

Result<std::shared_ptr<c10::Allocator>> CudaGroup::allocator() {
  if (const auto environment = CudaEnvironment::current(); !environment) return environment.status();
  // Pools keep it to the end of the process.
  static const std::shared_ptr<c10::Allocator> own =
      torch::cuda::CUDAPluggableAllocator::createCustomAllocator(&allocate, &release);
  return own;
}

std::map<int, std::vector<CudaSegment>> CudaGroup::segmentsOf(CudaPoolId pool) {
  auto segments = c10::cuda::CUDACachingAllocator::snapshot({pool.first, pool.second}).segments;
  std::ranges::sort(segments, {}, [](const auto& segment) { return segment.registration_counter; });
  std::map<int, std::vector<CudaSegment>> byDevice;
  for (const auto& segment : segments) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    byDevice[segment.device].push_back({reinterpret_cast<void*>(segment.address), segment.total_size});
  }
  return byDevice;
}

}  // namespace farandole::backend
