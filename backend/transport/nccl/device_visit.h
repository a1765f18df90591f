#pragma once

#include "backend/transport/nccl/cuda_api.h"

namespace farandole::transport {

// For as long as a thread, ours or a user's, does work of ours on a device: that is its current one, and the thread
// hinders no capture of a graph on others. Both are as before at the end.
class DeviceVisit {
 public:
  static constexpr int kNone = -1;  // of a visit that changes nothing
  DeviceVisit(const CudaApi& cuda, int device);
  ~DeviceVisit();
  DeviceVisit(const DeviceVisit&) = delete;
  DeviceVisit& operator=(const DeviceVisit&) = delete;

 private:
  const CudaApi& cuda_;
  const bool isNone_;
  int former_ = kNone;  // or it need not be set again
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace farandole::transport
