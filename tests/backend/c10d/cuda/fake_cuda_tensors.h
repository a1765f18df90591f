#pragma once

#include <ATen/ATen.h>

namespace farandole::backend {

// The same memory, said to be on CUDA.
inline at::Tensor onCuda(const at::Tensor& host, int device) {
  const at::Device where(at::kCUDA, static_cast<c10::DeviceIndex>(device));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), host.nbytes(),
      c10::DataPtr(
          host.data_ptr(), new at::Tensor(host), [](void* held) { delete static_cast<at::Tensor*>(held); }, where),
      nullptr, false);
  at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), host.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(host.sizes());
  return tensor;
}

}  // namespace farandole::backend
