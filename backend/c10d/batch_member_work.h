#pragma once

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/c10d/joint_work.h"

namespace farandole::backend {

// What an operation inside an open batch returns: it stands for the whole
// batch, which exists once the batch is ended.
class BatchMemberWork final : public ::c10d::Work {
 public:
  // `dropBatch` forgets the open batch; called when somebody waits before its end.
  BatchMemberWork(int rank, std::function<void()> dropBatch)
      : Work(rank, ::c10d::OpType::COALESCED), dropBatch_(std::move(dropBatch)) {}

  void setBatch(c10::intrusive_ptr<::c10d::Work> batch) {
    std::lock_guard lock(mutex_);
    batch_ = std::move(batch);
  }

  bool isCompleted() override {
    const auto batch = current();
    return batch != nullptr && batch->isCompleted();
  }
  bool isSuccess() const override {
    const auto batch = current();
    return batch != nullptr && batch->isSuccess();
  }
  std::exception_ptr exception() const override {
    const auto batch = current();
    return batch != nullptr ? batch->exception() : nullptr;
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override { return ended()->wait(timeout); }
  void synchronize() override { ended()->synchronize(); }
  // Overrides where torch has it (2.15).
  // NOLINTNEXTLINE(modernize-use-override)
  virtual void blockCurrentStream() { blockStreamFor(*ended()); }
  void abort() override { ended()->abort(); }
  std::vector<at::Tensor> result() override { return ended()->result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return ended()->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return ended()->getFutureResult(); }
  float getDuration() const override { return ended()->getDuration(); }
  std::uint64_t getSequencenumber() const override { return ended()->getSequencenumber(); }
  // Overrides from torch 2.12 on.
  // NOLINTNEXTLINE(modernize-use-override)
  virtual std::chrono::milliseconds getTimeout() const { return timeoutOf(*ended()); }

 private:
  // The batch, which somebody is about to wait for.
  c10::intrusive_ptr<::c10d::Work> ended() const {
    if (auto batch = current(); batch != nullptr) return batch;
    // As after an exception inside the batch: the next operation is on its own again.
    dropBatch_();
    TORCH_CHECK(false,
                "farandole: waited for an operation of a batch before the batch was ended; the batch is dropped, "
                "nothing of it was posted");
  }
  c10::intrusive_ptr<::c10d::Work> current() const {
    std::lock_guard lock(mutex_);
    return batch_;
  }

  const std::function<void()> dropBatch_;
  c10::intrusive_ptr<::c10d::Work> batch_;
};

}  // namespace farandole::backend
