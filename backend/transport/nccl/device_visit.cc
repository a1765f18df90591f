#include "backend/transport/nccl/device_visit.h"

namespace farandole::transport {

DeviceVisit::DeviceVisit(const CudaApi& cuda, int device) : cuda_(cuda), isNone_(device == kNone) {
  if (isNone_) return;
  (void)cuda_.check(cuda_.threadExchangeCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  int current = -1;
  const Status known = cuda_.check(cuda_.getDevice(&current), "cudaGetDevice");
  // A thread that has set none is said to be on device 0, and has no context.
  thread_local bool hasContext = false;
  if (known && current == device && hasContext) return;
  if (!cuda_.check(cuda_.setDevice(device), "cudaSetDevice")) return;
  hasContext = true;
  if (current != device) former_ = current;
}

DeviceVisit::~DeviceVisit() {
  if (isNone_) return;
  if (former_ != kNone) (void)cuda_.check(cuda_.restoreDevice(former_), "cudaSetDevice");
  (void)cuda_.check(cuda_.threadExchangeCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
}

}  // namespace farandole::transport
