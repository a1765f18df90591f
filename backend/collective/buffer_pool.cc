#include "backend/collective/buffer_pool.h"

#include <algorithm>
#include <bit>

namespace farandole::collective {

// Never destroyed: buffers may come back while the process ends.
BufferPool& BufferPool::instance() {
  static BufferPool* const pool = new BufferPool;
  return *pool;
}

BufferPool::Buffer::~Buffer() {
  if (memory_ != nullptr) BufferPool::instance().put(std::move(*this));
}

BufferPool::Buffer BufferPool::take(std::size_t bytes) {
  Buffer buffer;
  if (bytes == 0) return buffer;
  {
    std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->size_ >= bytes && (best == free_.end() || it->size_ < best->size_)) best = it;
    }
    if (best != free_.end()) {
      buffer = std::move(*best);
      free_.erase(best);
      freeBytes_ -= buffer.size_;
      return buffer;
    }
  }
  buffer.size_ = std::bit_ceil(bytes);
  buffer.memory_ = std::make_unique_for_overwrite<std::byte[]>(buffer.size_);
  return buffer;
}

void BufferPool::keepUpTo(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  keptBytes_ = bytes;
}

void BufferPool::put(Buffer&& buffer) {
  Buffer moved = std::move(buffer);
  std::unique_lock lock(mutex_);
  if (freeBytes_ + moved.size_ > keptBytes_) {
    lock.unlock();
    moved.memory_.reset();  // freed, not put back again
    return;
  }
  freeBytes_ += moved.size_;
  free_.push_back(std::move(moved));
}

}  // namespace farandole::collective
