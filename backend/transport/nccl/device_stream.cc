#include "backend/transport/nccl/device_stream.h"

namespace farandole::transport {

Result<std::unique_ptr<DeviceStream>> DeviceStream::make(const CudaApi& cuda, int device) {
  const DeviceScope scope(cuda, device);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  int least = 0;
  int greatest = 0;
  FARANDOLE_RETURN_IF_ERROR(cuda.check(cuda.streamPriorities(&least, &greatest), "cudaDeviceGetStreamPriorityRange"));
  cudaStream_t stream = nullptr;
  FARANDOLE_RETURN_IF_ERROR(
      cuda.check(cuda.streamCreate(&stream, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority"));
  return std::unique_ptr<DeviceStream>(new DeviceStream(cuda, stream));
}

}  // namespace farandole::transport
