#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/backend/transport/nccl/simulator/simulated_cluster.h"

namespace farandole::testing {

using namespace std::chrono_literals;

// A cluster and one thread for each rank at a time, for short tests of it.
class SimulatedRanks {
 public:
  explicit SimulatedRanks(int size, std::uint64_t seed = 1)
      : size(size), cluster(size, seed), nccl(cluster.nccl()), cuda(cluster.cuda()) {
    for (int rank = 0; rank < size; ++rank) streams.push_back(cluster.userStream(rank));
  }

  // Runs `body` on a thread of each rank, with its device, to the end.
  void each(const std::function<void(int rank)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) threads.push_back(on(rank, [&body, rank] { body(rank); }));
    for (std::thread& thread : threads) thread.join();
  }
  std::thread on(int rank, std::function<void()> body) {
    return std::thread([this, rank, body = std::move(body)] {
      EXPECT_EQ(cuda.setDevice(rank), cudaSuccess);
      body();
    });
  }

  // A communicator over all ranks.
  void join(const char* name = "world") {
    communicators.assign(static_cast<std::size_t>(size), nullptr);
    ncclUniqueId id;
    ASSERT_EQ(nccl.getUniqueId(&id), ncclSuccess);
    each([&](int rank) { EXPECT_EQ(init(rank, size, id, name), ncclSuccess); });
  }
  ncclResult_t init(int rank, int ranks, const ncclUniqueId& id, const char* name = "world") {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    config.commName = name;
    return nccl.commInitRankConfig(&communicators[static_cast<std::size_t>(rank)], ranks, id, rank, &config);
  }
  ncclComm_t comm(int rank) const { return communicators[static_cast<std::size_t>(rank)]; }
  cudaStream_t stream(int rank) const { return streams[static_cast<std::size_t>(rank)]; }
  bool synchronize(int rank, std::chrono::milliseconds limit = 10s) { return cluster.synchronize(stream(rank), limit); }
  // Whether `text` is in one of the violations.
  bool violated(const std::string& text) const {
    for (const std::string& violation : cluster.violations()) {
      if (violation.find(text) != std::string::npos) return true;
    }
    return false;
  }

  const int size;
  SimulatedCluster cluster;
  const transport::NcclApi nccl;
  const transport::CudaApi cuda;
  std::vector<cudaStream_t> streams;
  std::vector<ncclComm_t> communicators;
};

}  // namespace farandole::testing
