#include "backend/transport/nccl/device_visit.h"

namespace farandole::transport {

DeviceVisit::DeviceVisit(const CudaApi& cuda, int device) : cuda_(cuda) {
  if (device == kNone) return;
  exchangeCaptureMode();
  scope_.emplace(cuda_, device);
  // A thread that has set no device is said to be on device 0, and has no context.
  thread_local bool hasContext = false;
  if (!hasContext) hasContext = cuda_.check(cuda_.setDevice(device), "cudaSetDevice").isOk();
}

DeviceVisit::~DeviceVisit() {
  if (!scope_) return;
  scope_.reset();
  exchangeCaptureMode();
}

void DeviceVisit::exchangeCaptureMode() {
  (void)cuda_.check(cuda_.threadExchangeCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
}

}  // namespace farandole::transport
