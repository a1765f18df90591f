#pragma once

#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "backend/c10d/cuda/cuda_environment.h"
#include "backend/c10d/cuda/cuda_operation.h"
#include "backend/transport/nccl/device_group.h"

namespace farandole::backend {

// Operations on one device as c10d sees them. wait() makes the current stream wait; the host waits only for what is
// not launched yet (an edge that is being connected), where a timeout is given, for a barrier, and with torch's
// setting TORCH_NCCL_BLOCKING_WAIT.
class CudaWork final : public ::c10d::Work {
 public:
  CudaWork(const WorkOptions& options, CudaEnvironment environment, std::weak_ptr<transport::DeviceGroup> group,
           int device, std::vector<at::Tensor> results, std::vector<std::shared_ptr<CudaOperation>> operations,
           bool hostWaits);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override;
  // Overrides where torch has it (2.15).
  // NOLINTNEXTLINE(modernize-use-override)
  virtual void blockCurrentStream() { synchronize(); }
  bool wait(milliseconds timeout = kNoTimeout) override;
  // Ends the group: what runs on a device cannot be ended alone.
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  // A future of a WorkResult: it never holds an error, and waits for the device on the host.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }
  // Overrides from torch 2.12 on.
  // NOLINTNEXTLINE(modernize-use-override)
  virtual milliseconds getTimeout() const { return timeout_; }
  // Overrides where torch has it (2.15).
  // NOLINTNEXTLINE(modernize-use-override)
  virtual std::uint64_t getCompletionKey() const { return key_; }

 private:
  // The first error of the operations that have ended.
  Status status() const;
  // Once. Waits until the operations are launched.
  void completeFuture();
  void completeFutureResult() { futureResult_->markCompleted(static_cast<std::int64_t>(resultOf(status()))); }
  void markLaunched();
  template <typename IsDone>
  void awaitOnHost(transport::DeviceClock::time_point deadline, const IsDone& isDone);

  const CudaEnvironment environment_;
  const std::weak_ptr<transport::DeviceGroup> group_;
  const int device_;
  const std::uint64_t sequence_;
  const milliseconds timeout_;
  const std::uint64_t key_;
  const std::vector<at::Tensor> results_;
  const std::vector<std::shared_ptr<CudaOperation>> operations_;
  const bool hostWaits_;
  std::mutex futureMutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> futureResult_;
};

}  // namespace farandole::backend
