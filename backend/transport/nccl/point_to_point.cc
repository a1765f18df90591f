#include "backend/transport/nccl/point_to_point.h"

#include <algorithm>
#include <thread>

namespace farandole::transport {

PointToPoint::PointToPoint(Setup setup)
    : setup_(std::move(setup)), own_(setup_.runtime->cuda, setup_.events, setup_.device) {
  for (const auto& lane : own_.lanes()) addLane(lane);
}

Edge& PointToPoint::edgeOf(EdgeKey key) {
  const auto [found, isNew] = edges_.try_emplace(key);
  if (isNew) {
    addLane(found->second.lane);
    // It holds this object, and ends by itself: nobody can call off NCCL while it waits for the peer.
    std::thread([self = shared_from_this(), key] { self->connectNow(key); }).detach();
  }
  return found->second;
}

std::string PointToPoint::nameOf(EdgeKey key) const {
  const auto [peer, isSend] = key;
  const int source = isSend ? setup_.rank : peer;
  const int destination = isSend ? peer : setup_.rank;
  return setup_.groupName + " edge " + std::to_string(source) + ">" + std::to_string(destination);
}

Result<std::shared_ptr<NcclCommunicator>> PointToPoint::makeCommunicator(EdgeKey key) {
  const std::string name = nameOf(key);
  const int rank = key.second ? 0 : 1;
  const auto id = setup_.meeting->meet(name, rank, 2, DeviceClock::now() + setup_.timeout);
  if (!id) return id.status().wrap(name);
  return NcclCommunicator::connect(*setup_.runtime, {name, *id, rank, 2, setup_.device, setup_.maxCtas});
}

Status PointToPoint::warmUp(NcclCommunicator& communicator, cudaStream_t stream, bool isSend) const {
  // The first message makes the connection, for which the host waits: one without bytes, here.
  const NcclApi& nccl = setup_.runtime->nccl;
  const NcclCommunicator::Turn turn(communicator);
  if (turn.handle() == nullptr) return communicator.ended();
  NcclGroup group(nccl);
  if (isSend) {
    group.add(nccl.send(nullptr, 0, ncclUint8, 1, turn.handle(), stream), "ncclSend");
  } else {
    group.add(nccl.recv(nullptr, 0, ncclUint8, 0, turn.handle(), stream), "ncclRecv");
  }
  return group.end().wrapUnlessOk(communicator.name());
}

Status PointToPoint::connectEdge(EdgeKey key) {
  // What can fail here comes before the meeting: after it the peer waits in NCCL, where nobody can tell it.
  FARANDOLE_RETURN_IF_ERROR(settleOnDevice(setup_.runtime->cuda, setup_.device));
  auto stream = DeviceStream::make(setup_.runtime->cuda, setup_.device);
  if (!stream) return stream.status();
  auto communicator = makeCommunicator(key);
  if (!communicator) return communicator.status();
  if (!communicators_.add(*communicator)) return (*communicator)->ended();
  FARANDOLE_RETURN_IF_ERROR(warmUp(**communicator, (*stream)->handle(), key.second));
  std::lock_guard lock(mutex_);
  if (!over_) return over_;
  Edge& edge = edges_.at(key);
  edge.communicator = std::move(*communicator);
  edge.stream = std::move(*stream);
  for (EdgeMessage& message : edge.waiting) FARANDOLE_RETURN_IF_ERROR(launch({&message, 1}));
  edge.waiting.clear();
  return Status::ok();
}

void PointToPoint::connectNow(EdgeKey key) {
  const Status status = connectEdge(key);
  if (status) return;
  if (const auto group = setup_.group.lock()) group->fail(status);
}

Status PointToPoint::post(std::vector<EdgeMessage> messages) {
  std::vector<EdgeMessage> round;
  std::lock_guard lock(mutex_);
  if (!over_) return over_;
  const auto isOwn = [this](const EdgeMessage& message) { return message.peer == setup_.rank; };
  for (const EdgeMessage& message : messages) {
    if (isOwn(message)) FARANDOLE_RETURN_IF_ERROR(own_.post(message));
  }
  std::erase_if(messages, isOwn);
  while (!messages.empty()) {
    // The first that is left for each edge.
    std::vector<EdgeMessage> later;
    std::vector<EdgeKey> seen;
    for (EdgeMessage& message : messages) {
      const EdgeKey key(message.peer, message.isSend);
      const auto known = edges_.find(key);
      const bool isReady = known != edges_.end() && known->second.communicator != nullptr;
      if (!isReady) {
        if (message.isCaptured) {
          return Status::invalidArgument(nameOf(key) +
                                         " is not connected, and that cannot be captured in a graph; expected one "
                                         "message along it before the capture");
        }
        Edge& edge = edgeOf(key);
        edge.lane->add(message.operation);
        edge.waiting.push_back(std::move(message));
      } else if (std::find(seen.begin(), seen.end(), key) != seen.end()) {
        later.push_back(std::move(message));
      } else {
        seen.push_back(key);
        // Nobody looks after what a graph will run.
        if (!message.isCaptured) known->second.lane->add(message.operation);
        round.push_back(std::move(message));
      }
    }
    // The turns of several communicators are always taken in one order.
    std::ranges::sort(round, {}, [](const EdgeMessage& message) { return EdgeKey(message.peer, message.isSend); });
    FARANDOLE_RETURN_IF_ERROR(launch(round));
    round.clear();
    messages.swap(later);
  }
  setup_.watch->wake();
  return Status::ok();
}

Status PointToPoint::launch(std::span<EdgeMessage> messages) {
  if (messages.empty()) return Status::ok();
  const NcclApi& nccl = setup_.runtime->nccl;
  std::vector<Edge*> edges;
  std::vector<std::unique_ptr<NcclCommunicator::Turn>> turns;
  for (const EdgeMessage& message : messages) {
    Edge& edge = edges_.at({message.peer, message.isSend});
    edges.push_back(&edge);
    turns.push_back(std::make_unique<NcclCommunicator::Turn>(*edge.communicator));
    if (turns.back()->handle() == nullptr) return edge.communicator->ended();
    FARANDOLE_RETURN_IF_ERROR(message.ready->holdUp(edge.stream->handle()));
  }
  NcclGroup group(nccl);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const EdgeMessage& message = messages[i];
    cudaStream_t const stream = edges[i]->stream->handle();
    if (message.isSend) {
      group.add(nccl.send(message.data, message.bytes, ncclUint8, 1, turns[i]->handle(), stream), "ncclSend");
    } else {
      group.add(nccl.recv(message.data, message.bytes, ncclUint8, 0, turns[i]->handle(), stream), "ncclRecv");
    }
  }
  FARANDOLE_RETURN_IF_ERROR(group.end());
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const EdgeMessage& message = messages[i];
    auto end = setup_.events->take();
    if (!end) return end.status();
    FARANDOLE_RETURN_IF_ERROR(end->record(edges[i]->stream->handle(), message.isCaptured));
    message.operation->launched(std::move(*end), edges[i]->stream->handle());
  }
  return Status::ok();
}

void PointToPoint::addLane(const std::shared_ptr<DeviceLane>& lane) {
  setup_.watch->watch(setup_.group, lane);
  std::lock_guard lock(lanesMutex_);
  lanes_.push_back(lane);
}

std::vector<std::shared_ptr<DeviceLane>> PointToPoint::lanes() {
  std::lock_guard lock(lanesMutex_);
  return lanes_;
}

bool PointToPoint::isIdle() {
  bool isIdle = true;
  for (const auto& lane : lanes()) {
    (void)lane->sweep();
    isIdle = isIdle && lane->isEmpty();
  }
  return isIdle;
}

void PointToPoint::endAll(const Status& why) {
  for (const auto& lane : lanes()) lane->doom(why);
  // Before the lock, which somebody may hold who is stuck in a call.
  communicators_.abortAll();
  std::deque<EdgeMessage> waiting;
  {
    std::lock_guard lock(mutex_);
    if (over_) over_ = why;
    waiting = own_.takeWaiting();
    for (auto& [key, edge] : edges_) {
      std::move(edge.waiting.begin(), edge.waiting.end(), std::back_inserter(waiting));
      edge.waiting.clear();
    }
  }
  for (const auto& lane : lanes()) lane->endAll(why);
  for (const EdgeMessage& message : waiting) message.operation->finish(why);
}

}  // namespace farandole::transport
