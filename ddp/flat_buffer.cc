#include "ddp/flat_buffer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

namespace farandole::ddp {
namespace {

at::Tensor alias(const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  at::AutoDispatchBelowADInplaceOrView untracked;
  return at::as_strided(base, sizes, strides, offset);
}

}  // namespace

FlatBuffer::FlatBuffer(int64_t numel, const at::TensorOptions& options) {
  c10::NoGradGuard noGrad;
  data_ = at::zeros({numel}, options);
}

at::Tensor FlatBuffer::like(const at::Tensor& param, int64_t offset, bool isFlat) const {
  if (!isFlat && param.is_non_overlapping_and_dense()) return alias(data_, param.sizes(), param.strides(), offset);
  const auto strides = c10::contiguous_strides(param.sizes());
  return alias(data_, param.sizes(), strides, offset);
}

at::Tensor FlatBuffer::range(int64_t begin, int64_t end) const { return alias(data_, {end - begin}, {1}, begin); }

void FlatBuffer::zero() {
  c10::NoGradGuard noGrad;
  data_.zero_();
}

void FlatBuffer::scale(double factor) {
  c10::NoGradGuard noGrad;
  data_.mul_(factor);
}

}  // namespace farandole::ddp
