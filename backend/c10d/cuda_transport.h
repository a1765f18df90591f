#pragma once

#include <ATen/ATen.h>

#include <memory>

#include "backend/c10d/gated_messages.h"
#include "backend/transport/connections.h"
#include "backend/transport/ucx/ucx_config.h"

namespace farandole::backend {

// How far a stream has to come.
struct StreamMark;

// UCX as all groups of a process use it for messages of CUDA tensors: a worker and a thread of its own, so that tensors
// on the CPU neither wait for it nor pay for it. Made with the first group that wants it, gone with the last. Any
// thread, with nothing held.
class CudaTransport {
 public:
  // kUnavailable where this build, this machine or its UCX lacks CUDA; the message says what is missing.
  static Result<std::shared_ptr<CudaTransport>> acquire();
  // For the end of the process: nothing of CUDA is called any more that nobody asks for.
  static void leaveAtExit();

  virtual ~CudaTransport() = default;

  virtual transport::Connections& connections() = 0;
  // What is on the device's current stream by now; refuses a capture.
  virtual Result<std::shared_ptr<StreamMark>> mark(at::Device device) = 0;
  // Opens the work, which was launched, once the stream has come to the mark, and all that it must follow is open.
  virtual void openAfter(const std::shared_ptr<StreamMark>& mark, c10::intrusive_ptr<GatedMessagesWork> work) = 0;
};

}  // namespace farandole::backend
