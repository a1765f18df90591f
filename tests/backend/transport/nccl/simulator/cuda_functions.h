#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <string>

#include "tests/backend/transport/nccl/simulator/streams.h"
#include "tests/backend/transport/nccl/simulator/thread_state.h"

namespace farandole::testing {

// CUDA's side of the simulator: a method for each member of CudaApi that needs the cluster. They take the lock
// themselves.
class CudaFunctions {
 public:
  CudaFunctions(Core& core, Streams& streams) : core_(core), streams_(streams) {}

  const char* getErrorString(cudaError_t error);
  cudaError_t getLastError();
  cudaError_t getDevice(int* device);
  cudaError_t setDevice(int device);
  cudaError_t streamCreate(cudaStream_t* stream, unsigned flags, int priority);
  cudaError_t streamDestroy(cudaStream_t stream);
  cudaError_t streamPriorities(int* least, int* greatest);
  cudaError_t streamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
  cudaError_t streamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
  cudaError_t threadExchangeCaptureMode(cudaStreamCaptureMode* mode);
  cudaError_t eventCreate(cudaEvent_t* event, unsigned flags);
  cudaError_t eventDestroy(cudaEvent_t event);
  cudaError_t eventRecord(cudaEvent_t event, cudaStream_t stream);
  cudaError_t eventQuery(cudaEvent_t event);
  cudaError_t memcpyPeerAsync(void* to, int toDevice, const void* from, int fromDevice, std::size_t bytes,
                              cudaStream_t stream);

  int countEvents() const;  // with the lock

 private:
  struct Event {
    int device = 0;
    bool destroyed = false;
    std::shared_ptr<Moment> last;  // null: never recorded
  };

  ThreadState& thread() { return ThreadState::of(core_); }
  Stream* stream(cudaStream_t handle, const char* function) { return streams_.find(handle, thread().device, function); }
  Event* event(cudaEvent_t handle, const char* function);
  // Whether a capture that goes on forbids this thread what CUDA calls potentially unsafe.
  bool unsafeNow();

  Core& core_;
  Streams& streams_;
  std::map<cudaEvent_t, std::unique_ptr<Event>> events_;  // to the end, so that a late use is known
  std::map<cudaError_t, std::string> texts_;              // of getErrorString, which hands them out
};

}  // namespace farandole::testing
