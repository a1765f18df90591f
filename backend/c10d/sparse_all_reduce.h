#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "backend/c10d/sparse_sum.h"
#include "backend/c10d/work.h"
#include "backend/collective/algorithms.h"

namespace farandole::backend {

// The sum of sparse tensors on the CPU, in place.
//
// Thread: any; whoever comes first of a waiter and the thread that completes a
// round starts the next one.
class SparseAllReduceWork final : public ::c10d::Work {
 public:
  // Both works as yet without a program, and without anybody who is told of their ends: those of `options` are told of
  // this one's.
  SparseAllReduceWork(WorkOptions options, SparseSum sum, const collective::Topology& topology,
                      c10::intrusive_ptr<CollectiveWork> shapes, c10::intrusive_ptr<CollectiveWork> values);

  void launch();

  bool isCompleted() override { return isDone_; }
  bool isSuccess() const override { return isDone_ && error_ == nullptr; }
  std::exception_ptr exception() const override { return isDone_ ? error_ : nullptr; }
  std::vector<at::Tensor> result() override { return {sum_.tensor()}; }
  void synchronize() override { wait(); }
  bool wait(milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return futureResult_; }
  float getDuration() const override;
  std::uint64_t getSequencenumber() const override { return options_.sequence; }
  // Overrides from torch 2.12 on.
  // NOLINTBEGIN(modernize-use-override)
  virtual milliseconds getTimeout() const { return options_.timeout; }
  virtual std::uint64_t getCompletionKey() const { return options_.key; }
  // NOLINTEND(modernize-use-override)

 private:
  void afterShapes();
  void afterValues();
  void startValues();
  void end();
  ::c10d::WorkResult workResult() const;
  c10::intrusive_ptr<SparseAllReduceWork> self() { return c10::intrusive_ptr<SparseAllReduceWork>::reclaim_copy(this); }

  const WorkOptions options_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  SparseSum sum_;
  const collective::Topology topology_;
  const c10::intrusive_ptr<CollectiveWork> shapes_;
  const c10::intrusive_ptr<CollectiveWork> values_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  const c10::intrusive_ptr<c10::ivalue::Future> futureResult_;
  std::once_flag shapesDone_;
  std::once_flag valuesDone_;
  std::atomic<bool> hasValues_{false};  // values_ was launched
  std::exception_ptr error_;
  std::atomic<float> duration_{-1};  // milliseconds, or negative
  std::atomic<bool> isDone_{false};
};

}  // namespace farandole::backend
