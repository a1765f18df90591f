#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace farandole::backend {

// What Work::blockCurrentStream() does, where torch has it.
template <typename W>
void blockStreamFor(W& work) {
  if constexpr (requires { work.blockCurrentStream(); }) {
    work.blockCurrentStream();
  } else {
    work.synchronize();
  }
}

// The time limit of a work, where torch asks for it (2.12).
template <typename W>
std::chrono::milliseconds timeoutOf(const W& work) {
  if constexpr (requires { work.getTimeout(); }) {
    return work.getTimeout();
  } else {
    return kNoTimeout;
  }
}

// What wait() was given, for several works that are waited for one after the other.
class WaitLimit {
 public:
  explicit WaitLimit(std::chrono::milliseconds timeout);
  // For the next one. At least a millisecond, since none at all would be no limit.
  std::chrono::milliseconds left() const;

 private:
  const std::chrono::milliseconds timeout_;
  const bool isOwn_;  // none was given
  const std::chrono::steady_clock::time_point deadline_;
};

// Several works as one: done when all are.
class JointWork final : public ::c10d::Work {
 public:
  JointWork(int rank, ::c10d::OpType type, std::vector<c10::intrusive_ptr<::c10d::Work>> works)
      : Work(rank, type), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override { wait(); }
  // Overrides where torch has it (2.15).
  // NOLINTNEXTLINE(modernize-use-override)
  virtual void blockCurrentStream() {
    for (const auto& work : works_) blockStreamFor(*work);
  }
  // `timeout` is for all of them together.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  // The first WorkResult that is not SUCCESS, once all are done.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  // Of the longest.
  float getDuration() const override;
  // Of the first; an empty batch has none.
  std::uint64_t getSequencenumber() const override;
  // Overrides from torch 2.12 on. Of the longest.
  // NOLINTNEXTLINE(modernize-use-override)
  virtual std::chrono::milliseconds getTimeout() const;

 private:
  const std::vector<c10::intrusive_ptr<::c10d::Work>> works_;
};

}  // namespace farandole::backend
