#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace farandole::collective {

// Keeps scratch memory between collectives: fresh pages cost more than the
// reduction that uses them. Any thread.
class BufferPool {
 public:
  static constexpr std::size_t kKeptBytes = std::size_t{128} << 20;

  class Buffer {
   public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept = default;
    Buffer& operator=(Buffer&& other) noexcept = default;
    ~Buffer();
    std::byte* data() const { return memory_.get(); }
    std::size_t size() const { return size_; }

   private:
    friend class BufferPool;
    std::unique_ptr<std::byte[]> memory_;
    std::size_t size_ = 0;
  };

  static BufferPool& instance();
  // At least `bytes`, not cleared.
  Buffer take(std::size_t bytes);
  // What stays allocated while nobody uses it, in bytes; kKeptBytes unless it is called.
  void keepUpTo(std::size_t bytes);

 private:
  void put(Buffer&& buffer);

  std::mutex mutex_;
  std::vector<Buffer> free_;
  std::size_t freeBytes_ = 0;
  std::size_t keptBytes_ = kKeptBytes;
};

}  // namespace farandole::collective
