#pragma once

#include <ATen/ATen.h>

namespace farandole::ddp {

// One contiguous buffer of gradients, zero at first; `numel` in elements. The
// views it gives alias it without being autograd views of it: each has a version
// counter of its own, as separate gradients would.
class GradBuffer {
 public:
  GradBuffer(int64_t numel, const at::TensorOptions& options);

  // The gradient of `param`, from `offset` on: its shape, and its strides where they are dense.
  at::Tensor gradOf(const at::Tensor& param, int64_t offset) const;

  // The elements [begin, end), flat.
  at::Tensor range(int64_t begin, int64_t end) const;

  void zero();

 private:
  at::Tensor data_;
};

}  // namespace farandole::ddp
