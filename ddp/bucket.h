#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace farandole::ddp {

// A range of a gradient buffer that one collective reduces, and how far it is in
// the current round: parameters become ready, then it is issued, then waited for.
// Not synchronized: its GradReducer is.
class Bucket {
 public:
  // `data` is flat; `parameters` are the indices of those whose gradients lie in it.
  Bucket(at::Tensor data, std::vector<int> parameters);

  const std::vector<int>& parameters() const { return parameters_; }
  bool isReady() const { return pending_ == 0; }
  void markReady() { --pending_; }

  // Starts the average over the group: scales by 1 / size, then sums, as torch's
  // own reducer does, so that results are the same bits. Returns without waiting.
  void issue(c10d::ProcessGroup& group);

  // Blocks the host (or, on CUDA, the current stream) until the average is there.
  // Releases what issue() started, also when it throws.
  void wait(c10d::ProcessGroup& group);

  void reset();

 private:
  at::Tensor data_;  // real: complex gradients are seen as pairs
  std::vector<int> parameters_;
  size_t pending_;
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace farandole::ddp
