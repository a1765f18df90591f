#include "backend/c10d/open_batch.h"

#include <utility>

namespace farandole::backend {

void OpenBatch::open() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(
      !batch_ || thread_ == std::this_thread::get_id(),
      "farandole: another thread has a batch open on this group; expected one at a time, or a group per thread");
  if (batch_)
    TORCH_WARN("farandole: a batch of ", batch_->entries.size(), " operations was never ended; it is dropped");
  const auto dropThis = [weak = weak_from_this(), number = ++numOpened_] {
    if (const auto batch = weak.lock()) batch->drop(number);
  };
  batch_.emplace(Batch{numOpened_, {}, {}, std::make_shared<WorkOfBatch>(dropThis)});
  thread_ = std::this_thread::get_id();
  isOpen_ = true;
}

Batch* OpenBatch::find() {
  if (!isOpen_.load(std::memory_order_acquire)) return nullptr;
  std::lock_guard lock(mutex_);
  return batch_ && thread_ == std::this_thread::get_id() ? &*batch_ : nullptr;
}

Batch OpenBatch::take() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(batch_ && thread_ == std::this_thread::get_id(),
              "farandole: endCoalescing without startCoalescing on this thread");
  isOpen_ = false;
  return *std::exchange(batch_, std::nullopt);
}

void OpenBatch::drop(std::uint64_t number) {
  std::lock_guard lock(mutex_);
  if (!batch_ || batch_->number != number) return;
  batch_.reset();
  isOpen_ = false;
}

}  // namespace farandole::backend
