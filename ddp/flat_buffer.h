#pragma once

#include <ATen/ATen.h>

#include <cstddef>

namespace farandole::ddp {

// One contiguous buffer of gradients or parameters, zero at first; `numel` in elements. On the CPU what nobody has
// written to takes no memory.
// The views it gives alias it without being autograd views of it: each has a version
// counter of its own, as separate tensors would.
class FlatBuffer {
 public:
  FlatBuffer(int64_t numel, const at::TensorOptions& options);

  // From `offset` on: the shape of `param`, and its strides where they are dense; contiguous where `isFlat`.
  at::Tensor like(const at::Tensor& param, int64_t offset, bool isFlat = false) const;

  // The elements [begin, end), flat.
  at::Tensor range(int64_t begin, int64_t end) const;

  // Its memory is free for others until restore(), after which it is zero; views stay what they are, and must not be
  // touched meanwhile.
  void free();
  void restore();

  void zero();
  void scale(double factor);

 private:
  at::Tensor data_;
  std::size_t bytes_ = 0;  // while its memory is free
};

}  // namespace farandole::ddp
