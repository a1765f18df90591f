#pragma once

#include <optional>

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
  void exchangeCaptureMode();

  const CudaApi& cuda_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  std::optional<DeviceScope> scope_;  // none: a visit that changes nothing
};

}  // namespace farandole::transport
