#include "backend/c10d/premultiplication.h"

#include "backend/c10d/reduce_kernels.h"

namespace farandole::backend {
namespace {

std::optional<at::Scalar> factorOn(const at::Tensor& tensor, const ::c10d::ReduceOp& op) {
  return tensor.is_cuda() ? std::nullopt : premulFactor(op);
}

}  // namespace

void premultiply(const ::c10d::ReduceOp& op, const at::Tensor& tensor) {
  const auto factor = factorOn(tensor, op);
  if (!factor) return;
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  tensor.mul_(*factor);
}

at::Tensor premultiplied(const ::c10d::ReduceOp& op, const at::Tensor& tensor) {
  const auto factor = factorOn(tensor, op);
  if (!factor) return tensor;
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  return tensor.clone().mul_(*factor);
}

std::vector<at::Tensor> premultiplied(const ::c10d::ReduceOp& op, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> results;
  results.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) results.push_back(premultiplied(op, tensor));
  return results;
}

}  // namespace farandole::backend
