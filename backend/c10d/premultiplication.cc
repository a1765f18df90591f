#include "backend/c10d/premultiplication.h"

#include "backend/c10d/reduce_kernels.h"

namespace farandole::backend {
namespace {

std::optional<at::Scalar> factorOn(const at::Tensor& tensor, const ::c10d::ReduceOp& op) {
  return tensor.is_cuda() ? std::nullopt : premulFactor(op);
}

// ATen multiplies no float8.
void scaleBy(const at::Tensor& tensor, const at::Scalar& factor) {
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  if (c10::isFloat8Type(tensor.scalar_type())) {
    tensor.copy_(tensor.to(at::kFloat).mul_(factor));
  } else {
    tensor.mul_(factor);
  }
}

}  // namespace

void premultiply(const ::c10d::ReduceOp& op, const at::Tensor& tensor) {
  const auto factor = factorOn(tensor, op);
  if (factor) scaleBy(tensor, *factor);
}

at::Tensor premultiplied(const ::c10d::ReduceOp& op, const at::Tensor& tensor) {
  const auto factor = factorOn(tensor, op);
  if (!factor) return tensor;
  at::Tensor result = tensor.detach().clone();
  scaleBy(result, *factor);
  return result;
}

std::vector<at::Tensor> premultiplied(const ::c10d::ReduceOp& op, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> results;
  results.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) results.push_back(premultiplied(op, tensor));
  return results;
}

}  // namespace farandole::backend
