#include "backend/transport/shm/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "backend/transport/shm/mapping.h"

namespace farandole::transport {

Status systemError(const char* what) {
  return Status::unavailable(std::string(what) + ": " + std::generic_category().message(errno));
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) unmapShared(data_, bytes_);
}

Result<SharedMemory> SharedMemory::create(const char* name, std::size_t bytes) {
  SharedMemory memory;
  memory.descriptor_ = Descriptor(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.descriptor_) return systemError("memfd_create");
  if (ftruncate(memory.descriptor(), static_cast<off_t>(bytes)) != 0) return systemError("ftruncate of a memfd");
  // Whoever maps it may rely on its size.
  if (fcntl(memory.descriptor(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) return systemError("sealing a memfd");
  FARANDOLE_RETURN_IF_ERROR(memory.map(bytes));
  return memory;
}

Result<SharedMemory> SharedMemory::open(Descriptor descriptor, std::size_t bytes) {
  SharedMemory memory;
  memory.descriptor_ = std::move(descriptor);
  struct stat status = {};
  if (fstat(memory.descriptor(), &status) != 0) return systemError("fstat of shared memory");
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size < bytes) {
    return Status::internal("shared memory of " + std::to_string(size) + " bytes; expected " + std::to_string(bytes));
  }
  FARANDOLE_RETURN_IF_ERROR(memory.map(size));
  return memory;
}

Status SharedMemory::map(std::size_t bytes) {
  void* const data = mapShared(descriptor_.get(), bytes);
  if (data == MAP_FAILED) return systemError("mapping shared memory");
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
  return Status::ok();
}

}  // namespace farandole::transport
