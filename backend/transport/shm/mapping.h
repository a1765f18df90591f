#pragma once

#include <sys/types.h>

#include <cstddef>

namespace farandole::transport {

// What ranks that are threads of one process do to each other's memory is there for ThreadSanitizer to see, which goes
// by addresses: they share one mapping of a file, and reading another rank's memory in place counts as reading. In
// other builds these are mmap, munmap and nothing.
void* mapShared(int descriptor, std::size_t bytes);  // or MAP_FAILED
void unmapShared(void* data, std::size_t bytes);
#ifdef __SANITIZE_THREAD__
void noteRead(pid_t pid, const std::byte* from, std::size_t bytes);
#else
inline void noteRead(pid_t, const std::byte*, std::size_t) {}
#endif

}  // namespace farandole::transport
