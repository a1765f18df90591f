#pragma once

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/transport/nccl/nccl_communicator.h"

namespace farandole::transport {

// Communicators that are being aborted, each on a thread of its own: NCCL frees memory in an abort, for which CUDA
// waits until every kernel on the device has ended, those of communicators whose aborts are yet to come included (nccl
// issue 549). The kernels end when the aborts begin.
class Aborts {
 public:
  Aborts() = default;
  // What has not ended goes on.
  ~Aborts();
  Aborts(const Aborts&) = delete;
  Aborts& operator=(const Aborts&) = delete;

  void begin(std::shared_ptr<NcclCommunicator> communicator);
  // Until all have ended, which another group's kernels may hold up.
  void wait(std::chrono::milliseconds limit);
  // The same for those of the whole process that go on; for its end, before the libraries go.
  static void waitForAll(std::chrono::milliseconds limit);

 private:
  std::vector<std::future<void>> ends_;
};

// The communicators of a group, to be ended together. Apart from whoever uses them, who may be stuck in a call with
// locks of his own. Any thread.
class AbortableCommunicators {
 public:
  // False, and aborts it, after abortAll().
  bool add(const std::shared_ptr<NcclCommunicator>& communicator);
  // In `aborts`, for others to begin, too, before somebody waits.
  void abortAll(Aborts& aborts);
  // Waits on the host; the first error. Those that are captured in graphs end aside, and are added.
  Status closeAll(std::vector<std::future<Status>>& captured);
  // See NcclCommunicator.
  Status addMemoryUse(NcclMemoryUse& use);
  // What NCCL has found in any of them.
  Status asyncError();

 private:
  std::vector<std::shared_ptr<NcclCommunicator>> all();

  std::mutex mutex_;
  bool isOver_ = false;
  std::vector<std::shared_ptr<NcclCommunicator>> communicators_;
};

}  // namespace farandole::transport
