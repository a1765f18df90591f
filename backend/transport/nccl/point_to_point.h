#pragma once

#include <condition_variable>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/transport/nccl/abortable_communicators.h"
#include "backend/transport/nccl/communicator_meeting.h"
#include "backend/transport/nccl/device_watch.h"
#include "backend/transport/nccl/edge.h"
#include "backend/transport/nccl/edge_orders.h"
#include "backend/transport/nccl/own_messages.h"

namespace farandole::transport {

// The messages of one rank of a group between devices: one edge for each peer and direction, connected when it is first
// used or asked for, on a thread of its own. What is posted to an edge before that waits in its queue, so that no order
// in which ranks come to their edges can deadlock; and so does a batch whose order has to be agreed on (EdgeOrder).
//
// Two messages of one edge are never in one group of NCCL's: whether the other side groups them alike is not known, and
// NCCL calls it undefined where it does not (nccl issue 1279). Messages of different edges are launched together.
//
// Any thread; posts take turns.
class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
 public:
  struct Setup {
    const DeviceRuntime* runtime;
    std::shared_ptr<CommunicatorMeeting> meeting;
    std::shared_ptr<EdgeTalk> talk;
    std::shared_ptr<EventPool> events;
    std::shared_ptr<DeviceWatch> watch;
    std::weak_ptr<WatchedGroup> group;
    std::string groupName;  // in the communicators' names
    int rank;
    int size;
    int device;
    int ordinal;                        // of the device, among those that the rank has used
    int maxCtas;                        // for each edge
    std::chrono::milliseconds timeout;  // of connecting
  };
  explicit PointToPoint(Setup setup);

  // Before anything else.
  void begin();
  // Begins to connect these edges, as far as nobody has; those with this rank itself need nothing.
  Status connect(std::span<const EdgeKey> edges);
  // Posts the messages of one batch. Returns at once, also when an edge is not connected yet: then its operations are
  // launched later. An error that is not kInvalidArgument ends the group.
  Status post(std::vector<EdgeMessage> messages);
  // Now and then: tells the peers what was posted.
  void tellPeers() { orders_->tell(/*onlyUrgent=*/false); }
  // Ends what the device is done with; whether nothing is left.
  bool isIdle();
  // Ends everything with this error, in three steps: what has not run by now will fail; who is stuck in a call comes
  // out of it; and all that is left ends, and what comes later.
  void doom(const Status& why);
  void abortAll(Aborts& aborts) { communicators_.abortAll(aborts); }
  void endAll(const Status& why);
  // Waits on the host until what was sent has arrived; nothing may be posted any more. Edges that are captured in
  // graphs end aside, and are added.
  Status close(std::vector<std::future<Status>>& captured);
  Status addMemoryUse(NcclMemoryUse& use) { return communicators_.addMemoryUse(use); }
  // What NCCL has found.
  Status asyncError() { return communicators_.asyncError(); }

 private:
  Edge& edgeOf(EdgeKey key);
  void addLane(const std::shared_ptr<DeviceLane>& lane);
  std::vector<std::shared_ptr<DeviceLane>> lanes();
  std::string nameOf(EdgeKey key) const;
  // On a thread of its own.
  void connectNow(EdgeKey key);
  Status connectEdge(EdgeKey key);
  Result<std::shared_ptr<NcclCommunicator>> makeCommunicator(EdgeKey key);
  Status warmUp(NcclCommunicator& communicator, cudaStream_t stream, bool isSend) const;
  // On a thread of its own: what was unknown of an edge is known.
  void noteOrder(EdgeKey key, const Status& status);
  Status settleOrder(EdgeKey key);
  Status postNow(std::vector<EdgeMessage> messages);
  // The first message of each post as one launch, then the second ones, and so on. Posts of different edges.
  Status launchInRounds(std::vector<std::span<EdgeMessage>> posts);
  // Launches what waits for an edge, as far as it need not wait any more.
  Status launchWaiting(EdgeKey key, Edge& edge);
  // At most one message for each edge; all connected.
  Status launch(std::span<EdgeMessage> messages);

  const Setup setup_;
  const std::shared_ptr<EdgeOrders> orders_;
  AbortableCommunicators communicators_;
  std::mutex lanesMutex_;  // apart, as the communicators: mutex_ may be held by who is stuck in a call
  std::vector<std::shared_ptr<DeviceLane>> lanes_;
  std::mutex connectingMutex_;
  std::condition_variable connected_;
  std::set<EdgeKey> met_;  // whose two ends have met and are being connected
  std::mutex mutex_;
  std::map<EdgeKey, Edge> edges_;
  OwnMessages own_;
  Status over_;
};

}  // namespace farandole::transport
