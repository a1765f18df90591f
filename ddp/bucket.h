#pragma once

#include <ATen/ATen.h>

#include <memory>

#include "ddp/reduction.h"

namespace farandole::ddp {

// A range of a gradient buffer that is reduced as a whole, and how far it is in the
// current round. Not synchronized: its GradReducer is.
class Bucket {
 public:
  // `data` is flat.
  Bucket(const at::Tensor& data, std::shared_ptr<const Reduction> reduction);

  // Starts the reduction; returns without waiting.
  void issue();

  // Starts what comes between instances, once the first step has ended: true when that is started or not needed.
  // Ranks must do so in one order for all buckets. With `wait`, for that end if need be, as wait() does.
  bool advance(bool wait);

  // Blocks the host (or, on CUDA, the current stream) until the result is there.
  // Releases what was started, also when it throws. After advance().
  void wait();

  // What is under way. Null: nothing.
  const WorkPtr& work() const { return work_; }
  c10::DeviceType device() const { return data_.device().type(); }

  // Drops what an unfinished round has left.
  void reset();

 private:
  enum class Step { kIdle, kGroup, kInstances };

  void await(WorkPtr& work, const Group& group);

  at::Tensor data_;  // real: complex gradients are seen as pairs
  at::Tensor part_;  // this rank's, of data_
  std::shared_ptr<const Reduction> reduction_;
  Step step_ = Step::kIdle;
  WorkPtr work_;
};

}  // namespace farandole::ddp
