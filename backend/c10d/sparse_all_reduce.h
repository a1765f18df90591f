#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "backend/c10d/work.h"
#include "backend/collective/algorithms.h"

namespace farandole::backend {

// The sum of sparse tensors, in place: first all ranks tell each other their
// shapes and how many values they have, then indices and values are gathered,
// and every rank adds them up in the order of the ranks.
//
// Thread: any; whoever comes first of a waiter and the thread that completes a
// round starts the next one.
class SparseAllReduceWork final : public ::c10d::Work {
 public:
  // Both works as yet without a program; `tensor` is coalesced or not.
  SparseAllReduceWork(at::Tensor tensor, collective::Topology topology, c10::intrusive_ptr<CollectiveWork> shapes,
                      c10::intrusive_ptr<CollectiveWork> values);

  void launch();

  bool isCompleted() override { return isDone_; }
  bool isSuccess() const override { return isDone_ && error_ == nullptr; }
  std::exception_ptr exception() const override { return isDone_ ? error_ : nullptr; }
  std::vector<at::Tensor> result() override { return {tensor_}; }
  void synchronize() override { wait(); }
  bool wait(milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::uint64_t getSequencenumber() const override { return shapes_->getSequencenumber(); }

 private:
  void afterShapes();
  void afterValues();
  void startValues();
  void addUp();
  // Throws when another rank's tensor does not fit this one's; returns the number of values it has.
  std::int64_t checkShape(int rank) const;
  void end();
  c10::intrusive_ptr<SparseAllReduceWork> self() { return c10::intrusive_ptr<SparseAllReduceWork>::reclaim_copy(this); }

  const at::Tensor tensor_;
  const at::Tensor mine_;  // coalesced
  const collective::Topology topology_;
  const c10::intrusive_ptr<CollectiveWork> shapes_;
  const c10::intrusive_ptr<CollectiveWork> values_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  at::Tensor shapesOfAll_;  // a row for each rank
  std::vector<at::Tensor> indicesOfAll_;
  std::vector<at::Tensor> valuesOfAll_;
  std::once_flag shapesDone_;
  std::once_flag valuesDone_;
  std::atomic<bool> hasValues_{false};  // values_ was launched
  std::exception_ptr error_;
  std::atomic<bool> isDone_{false};
};

}  // namespace farandole::backend
