#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "pipeline/runtime/tensor_meta.h"

namespace farandole::pipeline {

// Receive buffers of one pipeline, used again by later microbatches and steps.
// One thread. A buffer that somebody still holds (a module that kept its input,
// an accumulated gradient that aliases it) is never handed out again.
class ActivationStore {
 public:
  // A contiguous tensor on the device with undefined contents, without gradient.
  at::Tensor take(const TensorMeta& meta, at::Device device);

  // Gives back a tensor that take() returned.
  void give(at::Tensor buffer);

  void clear() { free_.clear(); }
  std::size_t size() const { return free_.size(); }

 private:
  std::vector<at::Tensor> free_;
};

}  // namespace farandole::pipeline
