#include "ddp/flat_buffer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

namespace farandole::ddp {
namespace {

at::Tensor alias(const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  at::AutoDispatchBelowADInplaceOrView untracked;
  return at::as_strided(base, sizes, strides, offset);
}

// They are zero as before, and take memory once somebody writes there. Where the system does not do so nothing is lost.
void giveBackZeroPages(const at::Tensor& zeros) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(zeros.data_ptr());
  const std::uintptr_t first = (begin + page - 1) / page * page;
  const std::uintptr_t last = (begin + zeros.nbytes()) / page * page;
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace

FlatBuffer::FlatBuffer(int64_t numel, const at::TensorOptions& options) {
  c10::NoGradGuard noGrad;
  data_ = at::zeros({numel}, options);
  if (data_.is_cpu()) giveBackZeroPages(data_);
}

at::Tensor FlatBuffer::like(const at::Tensor& param, int64_t offset, bool isFlat) const {
  if (!isFlat && param.is_non_overlapping_and_dense()) return alias(data_, param.sizes(), param.strides(), offset);
  const auto strides = c10::contiguous_strides(param.sizes());
  return alias(data_, param.sizes(), strides, offset);
}

at::Tensor FlatBuffer::range(int64_t begin, int64_t end) const { return alias(data_, {end - begin}, {1}, begin); }

void FlatBuffer::free() {
  c10::StorageImpl* const storage = data_.storage().unsafeGetStorageImpl();
  bytes_ = storage->nbytes();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, data_.device()));
  storage->set_nbytes(0);
}

// May throw, and be called again.
void FlatBuffer::restore() {
  c10::StorageImpl* const storage = data_.storage().unsafeGetStorageImpl();
  if (bytes_ > 0) {
    const c10::OptionalDeviceGuard device(data_.device());
    storage->set_data_ptr_noswap(storage->allocator()->allocate(bytes_));
    storage->set_nbytes(std::exchange(bytes_, 0));
  }
  zero();
}

void FlatBuffer::zero() {
  c10::NoGradGuard noGrad;
  data_.zero_();
}

void FlatBuffer::scale(double factor) {
  c10::NoGradGuard noGrad;
  data_.mul_(factor);
}

}  // namespace farandole::ddp
