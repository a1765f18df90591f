#include "pipeline/sparse/freed_memory.h"

#include <cstddef>
#include <cstdlib>

namespace farandole::pipeline::sparse {

namespace {

constexpr std::size_t kMostAdapted = 31 << 20;  // glibc's malloc goes no further than 32 MiB

}  // namespace

// As the first free of a block of this size does it: malloc keeps what is freed, up to twice as much, and returns to
// the system what is beyond. Untouched memory costs nothing.
void keepFreedMemory() {
  void* volatile block = std::malloc(kMostAdapted);  // volatile, or the compiler leaves out both
  std::free(block);
}

}  // namespace farandole::pipeline::sparse
