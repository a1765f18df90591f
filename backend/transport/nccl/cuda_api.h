#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "backend/common/status.h"

// USE(member, function): what farandole calls of the CUDA runtime.
#define FARANDOLE_CUDA_FUNCTIONS(USE)                                 \
  USE(getErrorString, cudaGetErrorString)                             \
  USE(getLastError, cudaGetLastError)                                 \
  USE(getDevice, cudaGetDevice)                                       \
  USE(setDevice, cudaSetDevice)                                       \
  USE(streamCreate, cudaStreamCreateWithPriority)                     \
  USE(streamDestroy, cudaStreamDestroy)                               \
  USE(streamPriorities, cudaDeviceGetStreamPriorityRange)             \
  USE(streamWaitEvent, cudaStreamWaitEvent)                           \
  USE(streamIsCapturing, cudaStreamIsCapturing)                       \
  USE(threadExchangeCaptureMode, cudaThreadExchangeStreamCaptureMode) \
  USE(eventCreate, cudaEventCreateWithFlags)                          \
  USE(eventDestroy, cudaEventDestroy)                                 \
  USE(eventRecord, cudaEventRecord)                                   \
  USE(eventQuery, cudaEventQuery)                                     \
  USE(memcpyPeerAsync, cudaMemcpyPeerAsync)

namespace farandole::transport {

// The CUDA runtime's functions, from the library that torch has loaded, as NcclApi.
struct CudaApi {
#define FARANDOLE_MEMBER(member, function) decltype(&::function) member = nullptr;
  FARANDOLE_CUDA_FUNCTIONS(FARANDOLE_MEMBER)
#undef FARANDOLE_MEMBER

  // As setDevice, for going back to a device: may leave out what would make a context there.
  cudaError_t (*restoreDevice)(int device) = nullptr;

  // kUnavailable when no runtime of the version that this was compiled for is loaded.
  static Result<CudaApi> load();

  // Ok, or CUDA's text for the code after `what`. Takes the error off the thread, where it would be found by whoever
  // looks next.
  Status check(cudaError_t result, const char* what) const;
};

// For the start of a thread of our own: it works on this device, and hinders no capture of a graph on other threads.
Status settleOnDevice(const CudaApi& cuda, int device);

// Makes `device` the thread's current one, and the former one again at the end.
class DeviceScope {
 public:
  DeviceScope(const CudaApi& cuda, int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  const Status& status() const { return status_; }

 private:
  const CudaApi& cuda_;
  int former_ = -1;  // or it need not be set again
  Status status_;
};

}  // namespace farandole::transport
