#include "pipeline/runtime/activation_store.h"

namespace farandole::pipeline {

at::Tensor ActivationStore::take(const TensorMeta& meta) {
  for (std::size_t i = free_.size(); i-- > 0;) {
    at::Tensor& buffer = free_[i];
    if (buffer.scalar_type() != meta.dtype || buffer.sizes() != at::IntArrayRef(meta.sizes)) continue;
    at::Tensor found = std::move(buffer);
    buffer = std::move(free_.back());
    free_.pop_back();
    // Only ours: no alias, no saved tensor, no Python storage.
    if (found.use_count() == 1 && found.storage().use_count() == 1) return found;
  }
  return at::empty(meta.sizes, meta.dtype);
}

void ActivationStore::give(at::Tensor buffer) { free_.push_back(std::move(buffer)); }

}  // namespace farandole::pipeline
