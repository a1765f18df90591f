#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/transport/nccl/abortable_communicators.h"
#include "backend/transport/nccl/communicator_meeting.h"
#include "backend/transport/nccl/device_stream.h"
#include "backend/transport/nccl/device_watch.h"
#include "backend/transport/nccl/point_to_point.h"
#include "backend/transport/nccl/registered_memory.h"

namespace farandole::transport {

// What all of a group's devices have in common.
struct DeviceGroupSetup {
  const DeviceRuntime* runtime;
  std::shared_ptr<DeviceWatch> watch;
  std::shared_ptr<CommunicatorMeeting> meeting;
  std::shared_ptr<EdgeTalk> talk;
  std::string name;
  int rank;
  int size;
  int edgeCtas;                       // for each edge; 0: as NCCL thinks
  std::chrono::milliseconds timeout;  // of connecting
};

// One rank's part of a group on one device: the communicator and the stream of its collectives, and its edges. Any
// thread; collectives take turns.
class GroupOnDevice : public std::enable_shared_from_this<GroupOnDevice> {
 public:
  // `ordinal`: of this device among those that the rank has used, which is the same for all ranks.
  GroupOnDevice(DeviceGroupSetup setup, std::weak_ptr<WatchedGroup> group, int device, int ordinal);

  // Before anything else: makes the stream and is watched.
  Status begin();
  // Waits until the communicator of all ranks is there; the first call makes it, on a thread of its own.
  Status connect();
  // The same, of all ranks together, in place of the first connect(): the ranks of `parent` but for the excluded ones.
  // NCCL makes the communicator out of the parent's where all of them can do without that just now; they agree on it.
  Status connectFrom(std::shared_ptr<GroupOnDevice> parent, std::vector<int> excluded);
  bool isConnected() { return communicator() != nullptr; }
  int device() const { return device_; }
  int ordinal() const { return ordinal_; }
  // What a collective calls of NCCL.
  using Calls = std::function<void(NcclGroup&, ncclComm_t, cudaStream_t)>;
  // Puts `calls`, as one launch, after what is on `current` by now: on the group's own stream, or with `inOrder` on
  // `current` itself. The operation is launched then; where this fails whoever calls ends it. The launch is watched:
  // NCCL waits in it for the other ranks where it has to connect them.
  Status run(cudaStream_t current, bool inOrder, const std::shared_ptr<DeviceOperation>& operation, const Calls& calls);
  // After what is on `current` by now (see PointToPoint::post).
  Status post(cudaStream_t current, std::vector<EdgeMessage> messages);
  // See PointToPoint::connect().
  Status connectEdges(std::span<const EdgeKey> edges) { return pointToPoint_->connect(edges); }
  void tellPeers() { pointToPoint_->tellPeers(); }

  // A pool of the user's memory, for the collectives (see RegisteredMemory::set). All ranks have a part in what is
  // symmetric; an error of that ends the group. Not before connect().
  Status registerMemory(MemoryPoolId pool, const std::vector<MemorySegment>& segments, bool isSymmetric);
  // Once nothing that uses it is under way.
  Status deregisterMemory(MemoryPoolId pool);
  Status addMemoryUse(NcclMemoryUse& use);

  Status asyncError();
  // Ends what the device is done with; whether nothing is left.
  bool isIdle();
  void endAll(const Status& why);
  Status close();

 private:
  void connectNow();
  void noteAllHaveCome();  // from now on NCCL alone is waited for
  void adopt(std::shared_ptr<NcclCommunicator> communicator);
  std::shared_ptr<NcclCommunicator> communicator();  // null before connect()
  Result<std::shared_ptr<NcclCommunicator>> makeCommunicator();
  // Null: they did not agree.
  Result<std::shared_ptr<NcclCommunicator>> shrinkParent(const std::string& name);
  bool areCollectivesIdle();
  template <typename Use>
  Status withTurn(const Use& use);
  Result<bool> isCapturing(cudaStream_t stream) const;

  const DeviceGroupSetup setup_;
  const std::weak_ptr<WatchedGroup> group_;
  const int device_;
  const int ordinal_;
  const std::shared_ptr<EventPool> events_;
  const std::shared_ptr<PointToPoint> pointToPoint_;
  // Of what runs on our stream, and of what runs on streams of the caller's: there, two are not in order, and one that
  // has ended is found behind one that has not a little later.
  const std::shared_ptr<DeviceLane> lane_ = std::make_shared<DeviceLane>();
  const std::shared_ptr<DeviceLane> inOrderLane_ = std::make_shared<DeviceLane>();
  std::unique_ptr<DeviceStream> stream_;
  AbortableCommunicators communicators_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool isConnecting_ = false;
  DeviceClock::time_point connectedBy_ = DeviceClock::time_point::max();
  // Until it is connected; null where it is made from nothing.
  std::shared_ptr<GroupOnDevice> parent_;
  std::vector<int> excluded_;
  std::shared_ptr<NcclCommunicator> communicator_;
  RegisteredMemory memory_;  // in the turn of communicator_
  bool wasShrunk_ = false;   // likewise
  Status over_;
};

}  // namespace farandole::transport
