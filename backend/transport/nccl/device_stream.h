#pragma once

#include <memory>

#include "backend/transport/nccl/cuda_api.h"

namespace farandole::transport {

// A stream of our own on one device: of high priority, so that communication is not held up by a queue of kernels, and
// not held up by the default stream.
class DeviceStream {
 public:
  static Result<std::unique_ptr<DeviceStream>> make(const CudaApi& cuda, int device);
  ~DeviceStream() { (void)cuda_.streamDestroy(stream_); }
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  cudaStream_t handle() const { return stream_; }

 private:
  DeviceStream(const CudaApi& cuda, cudaStream_t stream) : cuda_(cuda), stream_(stream) {}

  const CudaApi& cuda_;
  cudaStream_t const stream_;
};

}  // namespace farandole::transport
