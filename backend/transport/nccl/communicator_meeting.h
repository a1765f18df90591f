#pragma once

#include <nccl.h>

#include <string>

#include "backend/common/status.h"
#include "backend/transport/nccl/device_operation.h"

namespace farandole::transport {

// Where the ranks of a communicator meet before it is made. Any thread.
class CommunicatorMeeting {
 public:
  virtual ~CommunicatorMeeting() = default;
  // Blocks until all `size` ranks of what is called `name` have come, and gives them the id that rank 0 brought; an
  // error says how many came by the deadline, or why the group is over. So NCCL, which cannot be called off while it
  // waits for ranks, is entered when they are there.
  virtual Result<ncclUniqueId> meet(const std::string& name, int rank, int size, DeviceClock::time_point deadline) = 0;
  // As above, at a place of its own: whether all have said yes.
  virtual Result<bool> agree(const std::string& name, int size, bool mine, DeviceClock::time_point deadline) = 0;
};

}  // namespace farandole::transport
