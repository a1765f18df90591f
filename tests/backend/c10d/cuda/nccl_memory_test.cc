// The user's memory in the CUDA half of a process group, on simulated devices.
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include "tests/backend/c10d/cuda/nccl_groups.h"

namespace farandole::backend {
namespace {

using Allocator = torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;

constexpr CudaPoolId kPool{0, 3};
constexpr std::size_t kBytes = 4096;

class NcclMemoryTest : public testing::NcclGroupTest {
 protected:
  static std::shared_ptr<Allocator> allocator() {
    auto made = CudaGroup::allocator();
    EXPECT_TRUE(made) << made.status().toString();
    return std::dynamic_pointer_cast<Allocator>(*made);
  }
  static std::string errorOf(const std::function<void()>& call) {
    try {
      call();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  }
};

TEST_F(NcclMemoryTest, PoolsGetTheirMemoryFromNccl) {
  const auto source = allocator();
  ASSERT_NE(source, nullptr);
  void* const memory = source->malloc(kBytes, 1, nullptr);
  EXPECT_NE(memory, nullptr);
  EXPECT_EQ(cluster_->live().allocations, 1);
  source->raw_delete(memory);
  EXPECT_EQ(cluster_->live().allocations, 0);
  for (const ncclResult_t code : {ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument}) {
    cluster_->failNccl("ncclMemAlloc", 1, code);
    EXPECT_NE(errorOf([&] { (void)source->malloc(kBytes, 1, nullptr); }).find("ncclMemAlloc of 4096 bytes"),
              std::string::npos);
  }
  EXPECT_EQ(cluster_->live().allocations, 0);
  // What cannot be freed is told, and no exception.
  void* const kept = source->malloc(kBytes, 1, nullptr);
  cluster_->failNccl("ncclMemFree", 1, ncclUnhandledCudaError);
  source->raw_delete(kept);
  EXPECT_EQ(runtime_.nccl.memFree(kept), ncclSuccess);
  close();
}

TEST_F(NcclMemoryTest, APoolIsRegisteredWithTheGroupsCommunicator) {
  const auto source = allocator();
  for (const bool isSymmetric : {false, true}) {
    std::vector<void*> memory;
    for (int rank = 0; rank < kSize; ++rank) memory.push_back(source->malloc(kBytes, rank, nullptr));
    each([&](int rank) {
      groups_[rank]->connect(device(rank));
      groups_[rank]->registerMemory(device(rank), kPool, {{memory[rank], kBytes}}, isSymmetric);
    });
    EXPECT_EQ(cluster_->live().registrations, kSize);
    each([&](int rank) { groups_[rank]->deregisterMemory(device(rank), kPool); });
    EXPECT_EQ(cluster_->live().registrations, 0);
    for (void* const one : memory) source->raw_delete(one);
  }
  EXPECT_NE(errorOf([&] {
              groups_[0]->deregisterMemory(device(0), kPool);
            }).find("deregister_mem_pool: memory pool (0, 3) is not registered"),
            std::string::npos);
  close();
}

TEST_F(NcclMemoryTest, AnErrorOfSymmetricMemoryEndsTheGroupAndOneOfOtherMemoryDoesNot) {
  const auto source = allocator();
  void* const memory = source->malloc(kBytes, 0, nullptr);
  each([&](int rank) { groups_[rank]->connect(device(rank)); });
  const auto attempt = [&](bool isSymmetric) {
    return errorOf([&] { groups_[0]->registerMemory(device(0), kPool, {{memory, kBytes}}, isSymmetric); });
  };
  cluster_->failNccl("ncclCommRegister", 1, ncclSystemError);
  EXPECT_NE(attempt(false).find("register_mem_pool: ncclCommRegister"), std::string::npos);
  EXPECT_TRUE(groups_[0]->status());
  cluster_->failNccl("ncclCommWindowRegister", 1, ncclSystemError);
  EXPECT_NE(attempt(true).find("register_mem_pool: ncclCommWindowRegister"), std::string::npos);
  EXPECT_FALSE(groups_[0]->status());
  source->raw_delete(memory);
  close();
}

TEST_F(NcclMemoryTest, WhatNcclAllocatedIsToldByTorchsNames) {
  each([&](int rank) { groups_[rank]->connect(device(rank)); });
  auto stats = groups_[0]->memoryStats();
  EXPECT_EQ(stats.size(), 4u);
  EXPECT_GT(stats.at("total"), 0u);
  EXPECT_EQ(stats.at("total"), stats.at("persist") + stats.at("suspend"));
  EXPECT_EQ(stats.at("suspended"), 0u);
  close();
}

}  // namespace
}  // namespace farandole::backend
