#include "pipeline/runtime/activation_store.h"

namespace farandole::pipeline {

at::Tensor ActivationStore::take(const TensorMeta& meta, at::Device device) {
  for (std::size_t i = free_.size(); i-- > 0;) {
    at::Tensor& buffer = free_[i];
    const bool fits = buffer.scalar_type() == meta.dtype && buffer.device() == device &&
                      buffer.sizes() == at::IntArrayRef(meta.sizes);
    if (!fits) continue;
    at::Tensor found = std::move(buffer);
    buffer = std::move(free_.back());
    free_.pop_back();
    // Only ours: no alias, no saved tensor, no Python storage.
    if (found.use_count() == 1 && found.storage().use_count() == 1) return found;
  }
  return at::empty(meta.sizes, at::TensorOptions(meta.dtype).device(device));
}

void ActivationStore::give(at::Tensor buffer) { free_.push_back(std::move(buffer)); }

}  // namespace farandole::pipeline
