#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace farandole::backend {

// PREMUL_SUM: what a rank gives is multiplied before the sum, in the tensor itself or in a copy; on CUDA by NCCL. Other
// reductions take it as it is.
void premultiply(const ::c10d::ReduceOp& op, const at::Tensor& tensor);
at::Tensor premultiplied(const ::c10d::ReduceOp& op, const at::Tensor& tensor);
std::vector<at::Tensor> premultiplied(const ::c10d::ReduceOp& op, const std::vector<at::Tensor>& tensors);

}  // namespace farandole::backend
