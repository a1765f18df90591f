#include "ddp/staging_memory.h"

#include <atomic>

namespace farandole::ddp {

namespace {

constexpr int64_t kPage = 4096;

at::Tensor bufferFor(int64_t bytes) { return at::empty((bytes + bytes / 4) / kPage * kPage + kPage, at::kByte); }

}  // namespace

at::Tensor StagingMemory::take(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  at::Tensor* fits = nullptr;      // the smallest that does
  at::Tensor* tooSmall = nullptr;  // the largest that is
  for (at::Tensor& buffer : buffers_) {
    if (buffer.storage().use_count() != 1) continue;
    if (buffer.numel() >= bytes) {
      if (fits == nullptr || buffer.numel() < fits->numel()) fits = &buffer;
    } else if (tooSmall == nullptr || buffer.numel() > tooSmall->numel()) {
      tooSmall = &buffer;
    }
  }
  if (fits != nullptr) {
    std::atomic_thread_fence(std::memory_order_acquire);  // counts are read relaxed: what others did with it is done
  } else if (tooSmall != nullptr) {
    *tooSmall = at::Tensor();
    *tooSmall = bufferFor(bytes);
    fits = tooSmall;
  } else {
    fits = &buffers_.emplace_back(bufferFor(bytes));
  }
  return fits->narrow(0, 0, bytes);
}

}  // namespace farandole::ddp
