#pragma once

#include <compare>
#include <deque>
#include <memory>
#include <vector>

#include "backend/transport/nccl/device_lane.h"
#include "backend/transport/nccl/device_stream.h"
#include "backend/transport/nccl/edge_order.h"
#include "backend/transport/nccl/nccl_communicator.h"

namespace farandole::transport {

// A directed edge, by its end here.
struct EdgeKey {
  int peer;
  bool isSend;

  auto operator<=>(const EdgeKey&) const = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14 sees a pointer
};

// What goes along one directed edge: to `peer`, or from it.
struct EdgeMessage {
  EdgeKey key() const { return {peer, isSend}; }

  bool isSend;
  int peer;
  void* data;
  EdgeNote note;
  std::shared_ptr<DeviceOperation> operation;
  std::shared_ptr<DeviceEvent> ready = nullptr;  // of the buffer; shared by what is issued together
  bool isCaptured = false;
};

// One end of a directed edge between two ranks: a communicator of its own, so that what waits for one peer holds up no
// other and a receive that was posted early no send, and a stream. Guarded by its owner.
struct Edge {
  // What was posted at once.
  struct Post {
    std::vector<EdgeMessage> messages;
    EdgeOrder::Order order;
  };

  std::shared_ptr<NcclCommunicator> communicator;  // rank 0 sends, rank 1 receives; null while connecting
  std::unique_ptr<DeviceStream> stream;
  std::shared_ptr<DeviceLane> lane = std::make_shared<DeviceLane>();
  std::deque<Post> waiting;  // for the connection, or until their order is known
};

}  // namespace farandole::transport
