#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

namespace farandole::testing {

// One call of a function of the tables.
struct Call {
  int device = 0;  // current when it was called
  std::thread::id thread;
  std::string function;      // "ncclSend"
  std::string communicator;  // its name; empty where the function takes none
  int peer = -1;             // or root
  std::size_t bytes = 0;
  cudaStream_t stream = nullptr;
};

// The calls that were made, in order; those that are made again and again to look at something are only counted. With
// the lock.
struct Journal {
  std::vector<Call> calls;
  std::map<std::string, int> counts;
};

}  // namespace farandole::testing
