#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <string>
#include <variant>
#include <vector>

#include "tests/backend/transport/nccl/simulator/kernel.h"

namespace farandole::testing {

struct Communicator;

// The calls between ncclGroupStart and ncclGroupEnd.
struct Group {
  struct Call {
    Communicator* communicator;
    Stream* stream;
    std::variant<CollectiveCall, MessageCall> what;
  };

  int depth = 0;
  ncclResult_t error = ncclSuccess;  // of a call in it; then nothing of the group is done
  std::vector<Call> calls;
};

// What CUDA and NCCL keep for each thread.
struct ThreadState {
  // This thread's, fresh when another cluster has begun.
  static ThreadState& of(const Core& core);

  std::uint64_t serial = 0;
  int device = 0;
  cudaStreamCaptureMode captureMode = cudaStreamCaptureModeGlobal;
  cudaError_t lastError = cudaSuccess;
  std::string lastNcclError;
  Group group;
};

}  // namespace farandole::testing
