#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "backend/c10d/cuda/cuda_environment.h"
#include "backend/c10d/cuda_group.h"
#include "tests/backend/c10d/cuda/fake_cuda_tensors.h"
#include "tests/backend/transport/nccl/simulator/simulated_cluster.h"
#include "tests/backend/transport/nccl/test_talk.h"

namespace farandole::backend::testing {

using ::c10d::OpType;
using farandole::testing::SimulatedCluster;
using transport::testing::TestTalk;
using namespace std::chrono_literals;
using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

inline std::vector<cudaStream_t>* currentStreams = nullptr;

using backend::onCuda;

// The CUDA half of three ranks, which are threads, on simulated devices.
class NcclGroupTest : public ::testing::Test {
 protected:
  static constexpr int kSize = 3;

  void SetUp() override {
    seed_ = std::random_device{}() % 1'000'000;
    std::cerr << "seed " << seed_ << '\n';
    begin(seed_);
  }
  void TearDown() override {
    groups_.clear();
    awaitThreads();
    EXPECT_EQ(cluster_->live().communicators, 0);
    const auto violations = cluster_->violations();
    EXPECT_EQ(violations, std::vector<std::string>{});
    CudaEnvironment::replace(nullptr);
    currentStreams = nullptr;
  }

  void begin(std::uint64_t seed) {
    cluster_ = std::make_unique<SimulatedCluster>(kSize, seed);
    runtime_ = {cluster_->cuda(), cluster_->nccl()};
    for (int rank = 0; rank < kSize; ++rank) streams_.push_back(cluster_->userStream(rank));
    currentStreams = &streams_;
    environment_ = {&runtime_, [](int device) { return currentStreams->at(device); }};
    CudaEnvironment::replace(&environment_);
    const auto store = c10::make_intrusive<::c10d::HashStore>();
    const auto talks = TestTalk::all(kSize, seed);
    for (int rank = 0; rank < kSize; ++rank) groups_.push_back(make(store, "group", rank, kSize, talks[rank]));
  }
  std::shared_ptr<CudaGroup> make(const c10::intrusive_ptr<::c10d::Store>& store, const std::string& name, int rank,
                                  int size, std::shared_ptr<TestTalk> talk) {
    {
      std::lock_guard lock(mutex_);
      talks_.push_back(talk);
    }
    CudaGroup::Setup setup;
    setup.store = store;
    setup.talk = std::move(talk);
    setup.name = name;
    setup.rank = rank;
    setup.size = size;
    setup.timeout = 20s;
    setup.ranksHealth = [] { return Status::ok(); };
    setup.onFailure = [](const Status&, bool) {};
    auto made = CudaGroup::make(setup);
    EXPECT_TRUE(made) << made.status().toString();
    return *made;
  }

  // A thread that was connecting when its group was aborted holds what is the group's on the device a little longer,
  // and gives it back to the cluster that is there by then: it has to be this one. The group's talk goes last.
  void awaitThreads() {
    const auto isThere = [](const std::weak_ptr<TestTalk>& talk) { return !talk.expired(); };
    const auto end = std::chrono::steady_clock::now() + 20s;
    while (std::ranges::any_of(talks_, isThere) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(1ms);
    }
    EXPECT_FALSE(std::ranges::any_of(talks_, isThere));
  }

  template <typename Body>
  void each(const Body& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kSize; ++rank) {
      threads.emplace_back([&, rank] {
        (void)runtime_.cuda.setDevice(rank);
        body(rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  void close() {
    each([&](int rank) { groups_[rank]->close(); });
  }

  static WorkOptions options(int rank, OpType type, std::uint64_t sequence = 0) {
    return {rank, type, "test", sequence, 20s, {}};
  }
  static at::Device device(int rank) { return {at::kCUDA, static_cast<c10::DeviceIndex>(rank)}; }

  // One collective: each rank's tensors on the host, what they are called with, and its results afterwards.
  void collective(int rank, std::vector<at::Tensor> tensors, const CudaGroup::Build& build) {
    std::vector<at::Tensor> results;
    for (const at::Tensor& tensor : tensors) results.push_back(onCuda(tensor, rank));
    const bool isAsync = ++calls_ % 2 == 0;
    const WorkPtr work =
        groups_[rank]->run(options(rank, OpType::ALLREDUCE), device(rank), isAsync, std::move(results), {}, build);
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(cluster_->synchronize(streams_[rank], 20s));
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->isSuccess());
  }

  std::uint64_t seed_ = 0;
  std::mutex mutex_;
  std::vector<std::weak_ptr<TestTalk>> talks_;
  std::atomic<int> calls_{0};
  std::unique_ptr<SimulatedCluster> cluster_;
  transport::DeviceRuntime runtime_;
  CudaEnvironment environment_;
  std::vector<cudaStream_t> streams_;
  std::vector<std::shared_ptr<CudaGroup>> groups_;
};

}  // namespace farandole::backend::testing
