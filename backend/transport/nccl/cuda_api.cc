#include "backend/transport/nccl/cuda_api.h"

#include <dlfcn.h>

namespace farandole::transport {

Result<CudaApi> CudaApi::load() {
  const std::string name = "libcudart.so." + std::to_string(CUDART_VERSION / 1000);
  // NOLOAD: only what torch has loaded already. The handle is kept: the library stays.
  void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    return Status::unavailable("no " + name +
                               " is loaded in this process: torch was built without CUDA, or for another");
  }
  CudaApi api;
#define FARANDOLE_TAKE(member, function)                                          \
  api.member = reinterpret_cast<decltype(api.member)>(dlsym(library, #function)); \
  if (api.member == nullptr) return Status::unavailable("the loaded " + name + " has no function " #function);
  FARANDOLE_CUDA_FUNCTIONS(FARANDOLE_TAKE)
#undef FARANDOLE_TAKE
  api.restoreDevice = api.setDevice;
  return api;
}

Status CudaApi::check(cudaError_t result, const char* what) const {
  if (result == cudaSuccess) return Status::ok();
  (void)getLastError();
  return Status::internal(std::string(what) + ": " + getErrorString(result));
}

Status settleOnDevice(const CudaApi& cuda, int device) {
  FARANDOLE_RETURN_IF_ERROR(cuda.check(cuda.setDevice(device), "cudaSetDevice"));
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  return cuda.check(cuda.threadExchangeCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
}

DeviceScope::DeviceScope(const CudaApi& cuda, int device) : cuda_(cuda) {
  int current = -1;
  status_ = cuda_.check(cuda_.getDevice(&current), "cudaGetDevice");
  if (!status_ || current == device) return;
  status_ = cuda_.check(cuda_.setDevice(device), "cudaSetDevice");
  if (status_) former_ = current;
}

DeviceScope::~DeviceScope() {
  if (former_ >= 0) (void)cuda_.restoreDevice(former_);
}

}  // namespace farandole::transport
