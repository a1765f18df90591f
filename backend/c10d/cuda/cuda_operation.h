#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "backend/c10d/cuda_group.h"
#include "backend/c10d/work.h"
#include "backend/transport/nccl/device_operation.h"

namespace farandole::backend {

// A collective, or the messages along one edge: the tensors that the device works on, kept until it is done with them
// or a stream that comes after it is known; and those who want to hear of its end.
class CudaOperation final : public transport::DeviceOperation {
 public:
  CudaOperation(const WorkOptions& options, std::vector<at::Tensor> results, std::vector<at::Tensor> kept);
  CudaOperation(const WorkOptions& options, const CudaMessage& message);

  std::string describe() const override;
  // Into the flight recorder. Before it is issued.
  void record();
  // Runs once it has ended, on the thread that ends it or on this one. Short.
  void whenEnded(std::function<void()> callback);

 protected:
  void ending(const Status& status) override;
  void ended() override;
  void dropBuffers() override;

 private:
  const WorkOptions options_;
  const int peer_;  // or kNobody
  const bool isSend_;
  const std::uint32_t tag_;
  const std::size_t bytes_;
  const std::uint64_t key_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::vector<at::Tensor> results_;
  std::vector<at::Tensor> kept_;
  std::mutex callbacksMutex_;
  std::vector<std::function<void()>> callbacks_;  // guarded by callbacksMutex_
  std::atomic<std::uint64_t> flightNumber_{kNotRecorded};
  static constexpr std::uint64_t kNotRecorded = ~std::uint64_t{0};
  static constexpr int kNobody = -1;
};

}  // namespace farandole::backend
