#include "backend/transport/nccl/group_on_device.h"

#include <optional>
#include <thread>

#include "backend/common/deadline.h"

namespace farandole::transport {
namespace {

constexpr std::chrono::milliseconds kHealthPeriod{50};
// Where another group's kernels hold them up, that group is ended next.
constexpr std::chrono::milliseconds kMostForAborts{500};
// For peers to get what was sent: while graphs exist NCCL does not say when they have it.
constexpr std::chrono::milliseconds kMostForGraphs{2000};

}  // namespace

GroupOnDevice::GroupOnDevice(DeviceGroupSetup setup, std::weak_ptr<WatchedGroup> group, int device, int ordinal)
    : setup_(std::move(setup)),
      group_(std::move(group)),
      device_(device),
      ordinal_(ordinal),
      events_(std::make_shared<EventPool>(setup_.runtime->cuda, device)),
      pointToPoint_(std::make_shared<PointToPoint>(
          PointToPoint::Setup{setup_.runtime, setup_.meeting, setup_.talk, events_, setup_.watch, group_,
                              setup_.name + " device " + std::to_string(ordinal), setup_.rank, setup_.size, device,
                              ordinal, setup_.edgeCtas, setup_.timeout})),
      memory_(setup_.runtime->nccl) {}

Status GroupOnDevice::begin() {
  auto stream = DeviceStream::make(setup_.runtime->cuda, device_);
  if (!stream) return stream.status();
  stream_ = std::move(*stream);
  pointToPoint_->begin();
  setup_.watch->watch(group_, device_, lane_);
  setup_.watch->watch(group_, device_, inOrderLane_);
  return Status::ok();
}

Status GroupOnDevice::connect() {
  std::unique_lock lock(mutex_);
  if (communicator_ == nullptr && over_ && !isConnecting_) {
    isConnecting_ = true;
    // It holds this object, and ends by itself: nobody can call off NCCL while it waits for ranks.
    std::thread([self = shared_from_this()] { self->connectNow(); }).detach();
  }
  const auto isDone = [&] { return communicator_ != nullptr || !over_; };
  while (!changed_.wait_for(lock, kHealthPeriod, isDone)) {
    // NCCL may wait for a rank that has ended the group, or stands still.
    const bool isLate = DeviceClock::now() > connectedBy_;
    lock.unlock();
    if (const auto group = group_.lock()) {
      Status health = group->health();
      if (health && isLate) {
        health = Status::timeout(setup_.name + ": NCCL has not connected its ranks within " +
                                 std::to_string(setup_.timeout.count()) + " ms");
      }
      if (!health) group->fail(health);
    }
    lock.lock();
  }
  return over_;
}

Status GroupOnDevice::connectFrom(std::shared_ptr<GroupOnDevice> parent, std::vector<int> excluded) {
  {
    std::lock_guard lock(mutex_);
    parent_ = std::move(parent);
    excluded_ = std::move(excluded);
  }
  return connect();
}

void GroupOnDevice::adopt(std::shared_ptr<NcclCommunicator> communicator) {
  if (!communicators_.add(communicator)) return;
  std::lock_guard lock(mutex_);
  communicator_ = std::move(communicator);
  changed_.notify_all();
}

std::shared_ptr<NcclCommunicator> GroupOnDevice::communicator() {
  std::lock_guard lock(mutex_);
  return communicator_;
}

Result<std::shared_ptr<NcclCommunicator>> GroupOnDevice::makeCommunicator() {
  const std::string name = setup_.name + " device " + std::to_string(ordinal_);
  auto shrunk = shrinkParent(name);
  if (!shrunk || *shrunk != nullptr) return shrunk;
  const auto id = setup_.meeting->meet(name, setup_.rank, setup_.size, deadlineIn(setup_.timeout));
  if (!id) return id.status().wrap(name);
  noteAllHaveCome();
  return NcclCommunicator::connect(*setup_.runtime, {name, *id, setup_.rank, setup_.size, device_});
}

Result<std::shared_ptr<NcclCommunicator>> GroupOnDevice::shrinkParent(const std::string& name) {
  std::shared_ptr<GroupOnDevice> parent;
  {
    std::lock_guard lock(mutex_);
    parent = std::move(parent_);
  }
  const std::shared_ptr<NcclCommunicator> none;
  if (parent == nullptr) return none;
  const auto from = parent->communicator();
  // Kept while the ranks agree: nobody begins anything there meanwhile, nor closes it.
  std::optional<NcclCommunicator::Turn> turn;
  if (from != nullptr && setup_.runtime->nccl.commShrink != nullptr) turn.emplace(*from, std::try_to_lock);
  // Once: NCCL (2.28 to 2.30) gives all that are made out of one communicator in this way the same hash, by which it
  // tells communicators apart.
  const bool mine = turn && turn->handle() != nullptr && !parent->wasShrunk_ && parent->areCollectivesIdle();
  const auto agreed = setup_.meeting->agree(name, setup_.size, mine, deadlineIn(setup_.timeout));
  if (!agreed) return agreed.status().wrap(name);
  if (!*agreed) return none;
  noteAllHaveCome();
  parent->wasShrunk_ = true;
  if (from->isAborted()) return from->ended();
  return NcclCommunicator::shrink(*setup_.runtime, name, *from, *turn, excluded_);
}

void GroupOnDevice::noteAllHaveCome() {
  std::lock_guard lock(mutex_);
  connectedBy_ = deadlineIn(setup_.timeout);
}

void GroupOnDevice::connectNow() {
  const Status settled = settleOnDevice(setup_.runtime->cuda, device_);
  auto made = settled ? makeCommunicator() : settled;
  if (made) return adopt(std::move(*made));
  if (const auto group = group_.lock()) group->fail(made.status());
}

Result<bool> GroupOnDevice::isCapturing(cudaStream_t stream) const {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  FARANDOLE_RETURN_IF_ERROR(
      setup_.runtime->cuda.check(setup_.runtime->cuda.streamIsCapturing(stream, &capture), "cudaStreamIsCapturing"));
  return capture != cudaStreamCaptureStatusNone;
}

Status GroupOnDevice::run(cudaStream_t current, bool inOrder, const std::shared_ptr<DeviceOperation>& operation,
                          const Calls& calls) {
  const DeviceScope scope(setup_.runtime->cuda, device_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  const auto captured = isCapturing(current);
  if (!captured) return captured.status();
  if (*captured && communicator() == nullptr) {
    return Status::invalidArgument(setup_.name +
                                   " is not connected, and that cannot be captured in a graph; expected a collective "
                                   "before the capture, or device_id in init_process_group");
  }
  FARANDOLE_RETURN_IF_ERROR(connect());
  cudaStream_t const stream = inOrder ? current : stream_->handle();
  auto end = events_->take();
  if (!end) return end.status();
  const NcclCommunicator::Turn turn(*communicator_);
  if (turn.handle() == nullptr) return communicator_->ended();
  if (*captured) communicator_->noteCaptured();
  if (!inOrder) {
    auto ready = events_->take();
    if (!ready) return ready.status();
    FARANDOLE_RETURN_IF_ERROR(ready->record(current, *captured));
    FARANDOLE_RETURN_IF_ERROR(ready->holdUp(stream));
  }
  NcclGroup group(setup_.runtime->nccl);
  calls(group, turn.handle(), stream);
  DeviceLane& lane = *(inOrder ? inOrderLane_ : lane_);
  // Before the launch: where this is the first one of its kind NCCL connects the ranks in it, and waits for them.
  lane.add(operation);
  setup_.watch->wake();
  Status launched = group.end();
  if (*captured) lane.remove(*operation);
  if (launched) launched = end->record(stream, *captured);
  if (launched) {
    operation->launched(std::move(*end), stream);
    return launched;
  }
  // What ended the group while this was stuck says more.
  const Status over = lane.over();
  return over ? launched : over;
}

Status GroupOnDevice::post(cudaStream_t current, std::vector<EdgeMessage> messages) {
  const DeviceScope scope(setup_.runtime->cuda, device_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  const auto captured = isCapturing(current);
  if (!captured) return captured.status();
  auto taken = events_->take();
  if (!taken) return taken.status();
  const auto ready = std::make_shared<DeviceEvent>(std::move(*taken));
  FARANDOLE_RETURN_IF_ERROR(ready->record(current, *captured));
  for (EdgeMessage& message : messages) {
    message.ready = ready;
    message.isCaptured = *captured;
  }
  return pointToPoint_->post(std::move(messages));
}

template <typename Use>
Status GroupOnDevice::withTurn(const Use& use) {
  const DeviceScope scope(setup_.runtime->cuda, device_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  const auto communicator = this->communicator();
  if (communicator == nullptr) {
    return Status::invalidArgument(setup_.name +
                                   " is not connected, and memory is registered with its communicator; expected a "
                                   "collective before, or device_id in init_process_group");
  }
  const NcclCommunicator::Turn turn(*communicator);
  return turn.handle() == nullptr ? communicator->ended() : use(turn.handle());
}

Status GroupOnDevice::registerMemory(MemoryPoolId pool, const std::vector<MemorySegment>& segments, bool isSymmetric) {
  return withTurn([&](ncclComm_t handle) { return memory_.set(handle, pool, segments, isSymmetric); });
}

Status GroupOnDevice::deregisterMemory(MemoryPoolId pool) {
  return withTurn([&](ncclComm_t handle) { return memory_.remove(handle, pool); });
}

Status GroupOnDevice::addMemoryUse(NcclMemoryUse& use) {
  const DeviceScope scope(setup_.runtime->cuda, device_);
  FARANDOLE_RETURN_IF_ERROR(scope.status());
  FARANDOLE_RETURN_IF_ERROR(communicators_.addMemoryUse(use));
  return pointToPoint_->addMemoryUse(use);
}

Status GroupOnDevice::asyncError() {
  FARANDOLE_RETURN_IF_ERROR(communicators_.asyncError());
  return pointToPoint_->asyncError();
}

bool GroupOnDevice::areCollectivesIdle() {
  bool isIdle = true;
  for (const auto& lane : {lane_, inOrderLane_}) {
    (void)lane->sweep();
    isIdle = isIdle && lane->isEmpty();
  }
  return isIdle;
}

bool GroupOnDevice::isIdle() {
  const bool areEdgesIdle = pointToPoint_->isIdle();
  return areCollectivesIdle() && areEdgesIdle;
}

void GroupOnDevice::endAll(const Status& why) {
  lane_->doom(why);
  inOrderLane_->doom(why);
  pointToPoint_->doom(why);
  Aborts aborts;
  communicators_.abortAll(aborts);
  pointToPoint_->abortAll(aborts);
  aborts.wait(kMostForAborts);
  {
    std::lock_guard lock(mutex_);
    if (over_) over_ = why;
  }
  changed_.notify_all();
  pointToPoint_->endAll(why);
  lane_->endAll(why);
  inOrderLane_->endAll(why);
}

Status GroupOnDevice::close() {
  FARANDOLE_RETURN_IF_ERROR(settleOnDevice(setup_.runtime->cuda, device_));
  if (communicator() != nullptr) {
    (void)withTurn([&](ncclComm_t handle) { return memory_.removeAll(handle); });
  }
  std::vector<std::future<Status>> captured;
  const Status edges = pointToPoint_->close(captured);
  const Status collectives = communicators_.closeAll(captured);
  Status first = edges ? collectives : edges;
  const auto deadline = DeviceClock::now() + kMostForGraphs;
  for (auto& end : captured) {
    if (end.wait_until(deadline) == std::future_status::timeout) continue;
    if (const Status status = end.get(); first) first = status;
  }
  return first;
}

}  // namespace farandole::transport
