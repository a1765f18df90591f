// The process group's part in NCCL's memory.
#include "backend/c10d/errors.h"
#include "backend/c10d/process_group.h"

namespace farandole::backend {

std::shared_ptr<c10::Allocator> ProcessGroupFarandole::getMemAllocator() {
  auto allocator = CudaGroup::allocator();
  throwIfError(allocator.status().wrapUnlessOk("mem_allocator"));
  return std::move(*allocator);
}

std::unordered_map<std::string, std::uint64_t> ProcessGroupFarandole::getMemoryStats() { return cuda().memoryStats(); }

void ProcessGroupFarandole::registerMemPool(CudaPoolId pool, bool isSymmetric, std::shared_ptr<void> keeper) {
  CudaGroup& group = cuda();
  auto segments = CudaGroup::segmentsOf(pool);
  // Not cudaMutex_, which abort() takes: ranks wait for each other here.
  std::lock_guard lock(poolsMutex_);
  RegisteredPool& registered = pools_[pool];
  registered.keeper = std::move(keeper);
  // Where it has lost all its segments, too.
  for (const int device : registered.devices) segments.try_emplace(device);
  for (const auto& [device, list] : segments) {
    group.registerMemory(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)), pool, list, isSymmetric);
    registered.devices.insert(device);
  }
}

void ProcessGroupFarandole::deregisterMemPool(CudaPoolId pool) {
  CudaGroup& group = cuda();
  RegisteredPool registered;
  {
    std::lock_guard lock(poolsMutex_);
    const auto found = pools_.find(pool);
    TORCH_CHECK_VALUE(found != pools_.end(), "deregister_mem_pool: pool (", pool.first, ", ", pool.second,
                      ") is not registered; expected one that is");
    registered = std::move(found->second);
    pools_.erase(found);
  }
  for (const int device : registered.devices) {
    group.deregisterMemory(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)), pool);
  }
}

}  // namespace farandole::backend
