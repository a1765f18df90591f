#include "pipeline/runtime/tensor_meta.h"

#include <c10/core/ScalarType.h>

namespace farandole::pipeline {

TensorMeta TensorMeta::of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.scalar_type(), tensor.requires_grad()};
}

std::string toString(const TensorMeta& meta) {
  std::string text(meta.isPacket ? "packet" : c10::getDtypeNames(meta.dtype).first);
  text += '[';
  for (std::size_t i = 0; i < meta.sizes.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(meta.sizes[i]);
  }
  text += ']';
  if (meta.requiresGrad) text += " requires grad";
  return text;
}

std::string toString(const std::vector<TensorMeta>& metas) {
  std::string text = "(";
  for (std::size_t i = 0; i < metas.size(); ++i) {
    if (i > 0) text += ", ";
    text += toString(metas[i]);
  }
  return text + ")";
}

}  // namespace farandole::pipeline
