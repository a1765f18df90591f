#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace farandole::ddp {

// Buffers on the CPU that are used over and over, for what stays in flight beside a forward and a backward: in the heap
// it would lie in another place each time, and what these allocate with it, in memory that no cache has. Any thread.
//
// As many buffers as were ever in use at the same time, with a quarter to spare.
class StagingMemory {
 public:
  // Bytes of a buffer that nothing else has. It is taken again once no tensor of its storage is left.
  at::Tensor take(int64_t bytes);

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> buffers_;
};

}  // namespace farandole::ddp
