#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "backend/c10d/cuda/cuda_environment.h"
#include "tests/backend/c10d/cuda/fake_cuda_tensors.h"
#include "tests/backend/transport/nccl/simulator/simulated_cluster.h"

namespace farandole::backend {

// CUDA as one rank's process sees it: one simulated device, whose streams run in random order, and UCX, the real one,
// for messages in what is host memory. Made first of all in the process; the group is made over it.
class SimulatedCuda {
 public:
  explicit SimulatedCuda(std::uint64_t seed, int numStreams = 3,
                         transport::UcxMemory memory = transport::UcxMemory::kDetected)
      : cluster(1, seed), runtime_{cluster.cuda(), cluster.nccl()} {
    for (int i = 0; i < numStreams; ++i) streams.push_back(cluster.userStream(0));
    current() = streams[0];
    environment_ = {&runtime_, [](int) { return current(); }, memory};
    CudaEnvironment::replace(&environment_);
    setenv("FARANDOLE_CUDA_MESSAGES", "ucx", 1);
  }

  // The calling thread's current stream.
  static cudaStream_t& current() {
    thread_local cudaStream_t stream = nullptr;
    return stream;
  }
  void use(int stream) { current() = streams[static_cast<std::size_t>(stream)]; }
  // A kernel on the current stream that fills this memory.
  void fill(const at::Tensor& host, int value) {
    cluster.enqueue(current(), [host, value] { host.view(-1).view(at::kByte).fill_(value); });
  }
  void expectNoViolation() const { EXPECT_EQ(cluster.violations(), std::vector<std::string>{}); }

  farandole::testing::SimulatedCluster cluster;
  std::vector<cudaStream_t> streams;

 private:
  transport::DeviceRuntime runtime_;
  CudaEnvironment environment_;
};

}  // namespace farandole::backend
