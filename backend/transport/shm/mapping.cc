#include "backend/transport/shm/mapping.h"

#include <sys/mman.h>

#ifdef __SANITIZE_THREAD__
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

extern "C" void __tsan_read_range(void* address, unsigned long bytes);
#endif

namespace farandole::transport {
namespace {

void* mapAlone(int descriptor, std::size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
}

}  // namespace

#ifdef __SANITIZE_THREAD__

namespace {

struct Mapping {
  void* data;
  int users;
};

std::mutex& mutex() {
  static std::mutex mutex;
  return mutex;
}

std::map<std::pair<dev_t, ino_t>, Mapping>& mappings() {
  static auto* const mappings = new std::map<std::pair<dev_t, ino_t>, Mapping>;
  return *mappings;
}

}  // namespace

void* mapShared(int descriptor, std::size_t bytes) {
  struct stat status = {};
  if (fstat(descriptor, &status) != 0) return MAP_FAILED;
  const std::lock_guard lock(mutex());
  const std::pair file(status.st_dev, status.st_ino);
  if (const auto found = mappings().find(file); found != mappings().end()) {
    ++found->second.users;
    return found->second.data;
  }
  void* const data = mapAlone(descriptor, bytes);
  if (data != MAP_FAILED) mappings()[file] = {data, 1};
  return data;
}

void unmapShared(void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex());
  const auto found =
      std::find_if(mappings().begin(), mappings().end(), [&](const auto& entry) { return entry.second.data == data; });
  if (--found->second.users > 0) return;
  mappings().erase(found);
  munmap(data, bytes);
}

void noteRead(pid_t pid, const std::byte* from, std::size_t bytes) {
  if (pid == getpid()) __tsan_read_range(const_cast<std::byte*>(from), bytes);
}

#else

void* mapShared(int descriptor, std::size_t bytes) { return mapAlone(descriptor, bytes); }
void unmapShared(void* data, std::size_t bytes) { munmap(data, bytes); }

#endif

}  // namespace farandole::transport
