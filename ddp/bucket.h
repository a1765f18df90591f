#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <vector>

#include "ddp/comm_hook.h"
#include "ddp/reduction.h"

namespace farandole::ddp {

// A range of a gradient buffer that is reduced as a whole, and how far it is in the
// current round. Not synchronized: its GradReducer is.
class Bucket {
 public:
  // `data` is flat.
  Bucket(const at::Tensor& data, std::shared_ptr<const Reduction> reduction);

  // The hook reduces it from now on, and knows it by this number.
  void setHook(std::shared_ptr<CommHook> hook, int index);

  // Starts the reduction, of `parts` where there are any; returns without waiting.
  void issue(Parts parts = {});
  bool takesParts() const { return !hook_ && reduction_->gathers(); }

  bool isAveraged() const { return reduction_->isAverage(); }

  // Lets go of what was read, or has come to be added up, once the first step has ended: true when none is left.
  bool releaseParts();

  // Starts what comes between instances, once the first step has ended: true when that is started or not needed.
  // Ranks must do so in one order for all buckets. With `wait`, for that end if need be, as wait() does.
  bool advance(bool wait);

  // Blocks the host (or, on CUDA, the current stream) until the result is there.
  // Releases what was started, also when it throws. After advance().
  void wait();

  bool hasHook() const { return hook_ != nullptr; }

  // What is under way. Null: nothing.
  const WorkPtr& work() const { return work_; }
  c10::DeviceType device() const { return data_.device().type(); }

  // Drops what an unfinished round has left.
  void reset();

 private:
  enum class Step { kIdle, kGroup, kInstances };

  void awaitGroup();
  void await(WorkPtr& work, const Group& group);

  at::Tensor data_;  // real: complex gradients are seen as pairs
  at::Tensor part_;  // this rank's, of data_
  std::shared_ptr<const Reduction> reduction_;
  std::shared_ptr<CommHook> hook_;
  int index_ = 0;
  Parts parts_;
  Step step_ = Step::kIdle;
  WorkPtr work_;
  Reduction::Received received_;
  CommHook::Future future_;  // the hook's
};

}  // namespace farandole::ddp
