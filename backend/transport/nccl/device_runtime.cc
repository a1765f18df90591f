#include "backend/transport/nccl/device_runtime.h"

namespace farandole::transport {

Result<const DeviceRuntime*> DeviceRuntime::ofProcess() {
  static const Result<DeviceRuntime> loaded = []() -> Result<DeviceRuntime> {
    auto cuda = CudaApi::load();
    if (!cuda) return cuda.status();
    auto nccl = NcclApi::load();
    if (!nccl) return nccl.status();
    return DeviceRuntime{*cuda, *nccl};
  }();
  if (!loaded) return loaded.status();
  return &*loaded;
}

}  // namespace farandole::transport
