#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/c10d/joint_work.h"

namespace farandole::backend {

// The Work of a batch, which exists once the batch is ended. Its members share this.
class WorkOfBatch {
 public:
  // `drop` forgets the open batch; called when somebody waits before its end.
  explicit WorkOfBatch(std::function<void()> drop) : drop_(std::move(drop)) {}

  void set(c10::intrusive_ptr<::c10d::Work> work) {
    std::lock_guard lock(mutex_);
    work_ = std::move(work);
  }
  // Or null.
  c10::intrusive_ptr<::c10d::Work> current() const {
    std::lock_guard lock(mutex_);
    return work_;
  }
  // For who is about to wait for it.
  c10::intrusive_ptr<::c10d::Work> ended() const {
    if (auto work = current(); work != nullptr) return work;
    // As after an exception inside the batch: the next operation is on its own again.
    drop_();
    TORCH_CHECK(false,
                "farandole: waited for an operation of a batch before the batch was ended; the batch is dropped, "
                "nothing of it was posted");
  }

 private:
  const std::function<void()> drop_;
  mutable std::mutex mutex_;
  c10::intrusive_ptr<::c10d::Work> work_;
};

// What an operation inside an open batch returns: it stands for the whole batch.
class BatchMemberWork final : public ::c10d::Work {
 public:
  // `key`: what torch knows this operation by (WorkHooks::keyIfTold).
  BatchMemberWork(int rank, std::shared_ptr<const WorkOfBatch> batch, std::uint64_t key)
      : Work(rank, ::c10d::OpType::COALESCED), batch_(std::move(batch)), key_(key) {}

  bool isCompleted() override {
    const auto work = batch_->current();
    return work != nullptr && work->isCompleted();
  }
  bool isSuccess() const override {
    const auto work = batch_->current();
    return work != nullptr && work->isSuccess();
  }
  std::exception_ptr exception() const override {
    const auto work = batch_->current();
    return work != nullptr ? work->exception() : nullptr;
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override { return batch_->ended()->wait(timeout); }
  void synchronize() override { batch_->ended()->synchronize(); }
  // Overrides where torch has it (2.15).
  // NOLINTNEXTLINE(modernize-use-override)
  virtual void blockCurrentStream() { blockStreamFor(*batch_->ended()); }
  void abort() override { batch_->ended()->abort(); }
  std::vector<at::Tensor> result() override { return batch_->ended()->result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return batch_->ended()->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return batch_->ended()->getFutureResult(); }
  float getDuration() const override { return batch_->ended()->getDuration(); }
  std::uint64_t getSequencenumber() const override { return batch_->ended()->getSequencenumber(); }
  // Overrides from torch 2.12 on.
  // NOLINTNEXTLINE(modernize-use-override)
  virtual std::chrono::milliseconds getTimeout() const { return timeoutOf(*batch_->ended()); }
  // Overrides where torch has it (2.15): of this operation alone.
  // NOLINTNEXTLINE(modernize-use-override)
  virtual std::uint64_t getCompletionKey() const { return key_; }

 private:
  const std::shared_ptr<const WorkOfBatch> batch_;
  const std::uint64_t key_;
};

}  // namespace farandole::backend
