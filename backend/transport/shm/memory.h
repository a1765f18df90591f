#pragma once

#include <cstddef>
#include <utility>

#include "backend/common/status.h"
#include "backend/transport/descriptor.h"

namespace farandole::transport {

// Memory that is shared with whom the descriptor is passed to. It has no name,
// so nothing is left behind however its processes end, and a container's small
// /dev/shm does not limit it.
class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept { swap(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~SharedMemory();

  // All zero; pages cost memory once they are touched.
  static Result<SharedMemory> create(const char* name, std::size_t bytes);
  // What somebody else created, all of it. Fails when it is smaller than `bytes`.
  static Result<SharedMemory> open(Descriptor descriptor, std::size_t bytes);

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_.get(); }
  // The mapping stays.
  void closeDescriptor() { descriptor_ = Descriptor(); }

 private:
  void swap(SharedMemory& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  Status map(std::size_t bytes);

  Descriptor descriptor_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// "what: the text of errno".
Status systemError(const char* what);

}  // namespace farandole::transport
