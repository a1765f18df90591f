#include "backend/transport/nccl/point_to_point.h"

#include <algorithm>
#include <thread>

#include "backend/common/deadline.h"

namespace farandole::transport {
namespace {

void sortByTag(std::span<EdgeMessage> messages) {
  std::ranges::stable_sort(messages, {}, [](const EdgeMessage& message) { return message.note.tag; });
}

}  // namespace

PointToPoint::PointToPoint(Setup setup)
    : setup_(std::move(setup)),
      orders_(std::make_shared<EdgeOrders>(setup_.talk, setup_.ordinal)),
      own_(setup_.runtime->cuda, setup_.events, setup_.device, *setup_.talk) {
  for (const auto& lane : own_.lanes()) addLane(lane);
}

void PointToPoint::begin() {
  orders_->begin([weak = weak_from_this()](EdgeKey key, const Status& status) {
    if (const auto self = weak.lock()) self->noteOrder(key, status);
  });
}

Edge& PointToPoint::edgeOf(EdgeKey key) {
  const auto [found, isNew] = edges_.try_emplace(key);
  if (isNew) {
    addLane(found->second.lane);
    orders_->open(key.peer);
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
  const int rank = key.isSend ? 0 : 1;
  const auto id = setup_.meeting->meet(name, rank, 2, deadlineIn(setup_.timeout));
  if (!id) return id.status().wrap(name);
  {
    std::lock_guard lock(connectingMutex_);
    met_.insert(key);
  }
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
  FARANDOLE_RETURN_IF_ERROR(warmUp(**communicator, (*stream)->handle(), key.isSend));
  std::lock_guard lock(mutex_);
  if (!over_) return over_;
  Edge& edge = edges_.at(key);
  edge.communicator = std::move(*communicator);
  edge.stream = std::move(*stream);
  return launchWaiting(key, edge);
}

void PointToPoint::connectNow(EdgeKey key) {
  const Status status = connectEdge(key);
  {
    std::lock_guard lock(connectingMutex_);
    met_.erase(key);
  }
  connected_.notify_all();
  if (status) return;
  if (const auto group = setup_.group.lock()) group->fail(status);
}

Status PointToPoint::close(std::vector<std::future<Status>>& captured) {
  {
    // The other end of an edge waits for this one to close it, too.
    std::unique_lock lock(connectingMutex_);
    connected_.wait_for(lock, setup_.timeout, [this] { return met_.empty(); });
  }
  return communicators_.closeAll(captured);
}

void PointToPoint::noteOrder(EdgeKey key, const Status& status) {
  const Status settled = status ? settleOrder(key) : status;
  if (settled) return;
  if (const auto group = setup_.group.lock()) group->fail(settled.wrap(nameOf(key)));
}

Status PointToPoint::settleOrder(EdgeKey key) {
  FARANDOLE_RETURN_IF_ERROR(settleOnDevice(setup_.runtime->cuda, setup_.device));
  std::lock_guard lock(mutex_);
  return over_ ? launchWaiting(key, edges_.at(key)) : over_;
}

Status PointToPoint::connect(std::span<const EdgeKey> edges) {
  std::lock_guard lock(mutex_);
  if (!over_) return over_;
  for (const EdgeKey& key : edges) {
    if (key.peer != setup_.rank) (void)edgeOf(key);
  }
  return Status::ok();
}

Status PointToPoint::post(std::vector<EdgeMessage> messages) {
  {
    std::lock_guard lock(mutex_);
    FARANDOLE_RETURN_IF_ERROR(postNow(std::move(messages)));
  }
  orders_->tell(/*onlyUrgent=*/true);
  setup_.watch->wake();
  return Status::ok();
}

Status PointToPoint::postNow(std::vector<EdgeMessage> messages) {
  if (!over_) return over_;
  const auto isOwn = [this](const EdgeMessage& message) { return message.peer == setup_.rank; };
  for (const EdgeMessage& message : messages) {
    if (isOwn(message)) FARANDOLE_RETURN_IF_ERROR(own_.post(message));
  }
  std::size_t numPosted = std::erase_if(messages, isOwn);
  // By edge. Ranks i and j meet in round (i + j) mod n, so that not all begin with the same peer; and the turns of
  // several communicators are always taken in one order.
  if (messages.size() > 1) {
    std::ranges::stable_sort(messages, {}, [this](const EdgeMessage& message) {
      return std::pair((setup_.rank + message.peer) % setup_.size, message.isSend);
    });
  }
  // A batch cannot be refused in part.
  const auto refuse = [&numPosted](const std::string& text) {
    return numPosted > 0 ? Status::internal(text) : Status::invalidArgument(text);
  };
  std::vector<std::span<EdgeMessage>> ready;  // of each edge
  for (std::span<EdgeMessage> rest = messages; !rest.empty();) {
    const EdgeKey key = rest.front().key();
    const auto end = std::ranges::find_if(rest, [&](const EdgeMessage& message) { return message.key() != key; });
    const std::span<EdgeMessage> post(rest.begin(), end);
    rest = rest.subspan(post.size());
    const bool isCaptured = post.front().isCaptured;
    const auto known = edges_.find(key);
    const bool isReady =
        known != edges_.end() && known->second.communicator != nullptr && known->second.waiting.empty();
    if (!isReady && isCaptured) {
      return refuse(nameOf(key) +
                    " is not connected, and that cannot be captured in a graph; expected one "
                    "message along it before the capture");
    }
    const auto order = orders_->post(key, post);
    if (!order) {
      const Status& status = order.status();
      return status.code() == StatusCode::kInvalidArgument ? refuse(status.toString()) : status;
    }
    numPosted += post.size();
    Edge& edge = edgeOf(key);
    // Nobody looks after what a graph will run.
    for (const EdgeMessage& message : post) {
      if (!isCaptured) edge.lane->add(message.operation);
    }
    if (*order == EdgeOrder::Order::kByTag) sortByTag(post);
    if (isReady && *order != EdgeOrder::Order::kUnknown) {
      ready.push_back(post);
    } else {
      edge.waiting.push_back({{std::make_move_iterator(post.begin()), std::make_move_iterator(post.end())}, *order});
    }
  }
  return launchInRounds(std::move(ready));
}

Status PointToPoint::launchInRounds(std::vector<std::span<EdgeMessage>> posts) {
  std::vector<EdgeMessage> round;
  for (std::size_t i = 0; !posts.empty(); ++i) {
    std::erase_if(posts, [&](std::span<EdgeMessage> post) { return post.size() <= i; });
    for (const std::span<EdgeMessage> post : posts) round.push_back(std::move(post[i]));
    for (std::span<EdgeMessage> rest = round; !rest.empty();) {
      const auto group = rest.first(std::min<std::size_t>(rest.size(), NcclGroup::kMostCalls));
      FARANDOLE_RETURN_IF_ERROR(launch(group));
      rest = rest.subspan(group.size());
    }
    round.clear();
  }
  return Status::ok();
}

Status PointToPoint::launchWaiting(EdgeKey key, Edge& edge) {
  if (edge.communicator == nullptr) return Status::ok();
  while (!edge.waiting.empty()) {
    Edge::Post& post = edge.waiting.front();
    if (post.order == EdgeOrder::Order::kUnknown) {
      const auto settled = orders_->takeSettled(key);
      if (!settled) return Status::ok();
      post.order = *settled;
      if (post.order == EdgeOrder::Order::kByTag) sortByTag(post.messages);
    }
    for (EdgeMessage& message : post.messages) FARANDOLE_RETURN_IF_ERROR(launch({&message, 1}));
    edge.waiting.pop_front();
  }
  return Status::ok();
}

Status PointToPoint::launch(std::span<EdgeMessage> messages) {
  if (messages.empty()) return Status::ok();
  const NcclApi& nccl = setup_.runtime->nccl;
  std::vector<Edge*> edges;
  std::vector<std::unique_ptr<NcclCommunicator::Turn>> turns;
  for (const EdgeMessage& message : messages) {
    Edge& edge = edges_.at(message.key());
    edges.push_back(&edge);
    turns.push_back(std::make_unique<NcclCommunicator::Turn>(*edge.communicator));
    if (turns.back()->handle() == nullptr) return edge.communicator->ended();
    if (message.isCaptured) edge.communicator->noteCaptured();
    FARANDOLE_RETURN_IF_ERROR(message.ready->holdUp(edge.stream->handle()));
  }
  NcclGroup group(nccl);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const EdgeMessage& message = messages[i];
    cudaStream_t const stream = edges[i]->stream->handle();
    if (message.isSend) {
      group.add(nccl.send(message.data, message.note.bytes, ncclUint8, 1, turns[i]->handle(), stream), "ncclSend");
    } else {
      group.add(nccl.recv(message.data, message.note.bytes, ncclUint8, 0, turns[i]->handle(), stream), "ncclRecv");
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
  setup_.watch->watch(setup_.group, setup_.device, lane);
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

void PointToPoint::doom(const Status& why) {
  for (const auto& lane : lanes()) lane->doom(why);
}

void PointToPoint::endAll(const Status& why) {
  std::deque<EdgeMessage> waiting;
  {
    std::lock_guard lock(mutex_);
    if (over_) over_ = why;
    waiting = own_.takeWaiting();
    for (auto& [key, edge] : edges_) {
      for (Edge::Post& post : edge.waiting) std::ranges::move(post.messages, std::back_inserter(waiting));
      edge.waiting.clear();
    }
  }
  for (const auto& lane : lanes()) lane->endAll(why);
  for (const EdgeMessage& message : waiting) message.operation->finish(why);
}

}  // namespace farandole::transport
