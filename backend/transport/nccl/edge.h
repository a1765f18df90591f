#pragma once

#include <cstddef>
#include <deque>
#include <memory>

#include "backend/transport/nccl/device_lane.h"
#include "backend/transport/nccl/device_stream.h"
#include "backend/transport/nccl/nccl_communicator.h"

namespace farandole::transport {

// What goes along one directed edge: to `peer`, or from it.
struct EdgeMessage {
  bool isSend;
  int peer;
  void* data;
  std::size_t bytes;
  std::shared_ptr<DeviceOperation> operation;
  std::shared_ptr<DeviceEvent> ready;  // of the buffer; shared by what is issued together
  bool isCaptured;
};

// One end of a directed edge between two ranks: a communicator of its own, so that what waits for one peer holds up no
// other and a receive that was posted early no send, and a stream. Messages go in the order in which they were posted.
// Guarded by its owner.
struct Edge {
  std::shared_ptr<NcclCommunicator> communicator;  // rank 0 sends, rank 1 receives; null while connecting
  std::unique_ptr<DeviceStream> stream;
  std::shared_ptr<DeviceLane> lane = std::make_shared<DeviceLane>();
  std::deque<EdgeMessage> waiting;  // for the connection
};

}  // namespace farandole::transport
