#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "backend/transport/nccl/nccl_communicator.h"

namespace farandole::transport {

// The communicators of a group, to be ended together. Apart from whoever uses them, who may be stuck in a call with
// locks of his own. Any thread.
class AbortableCommunicators {
 public:
  // False, and aborts it, after abortAll().
  bool add(const std::shared_ptr<NcclCommunicator>& communicator);
  void abortAll();
  // Waits on the host; the first error.
  Status closeAll();
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
