#include "backend/transport/shm/shm_transport.h"

#include <poll.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "backend/common/settings.h"

namespace farandole::transport {
namespace {

constexpr std::size_t kEagerBytes = 8 << 10;
constexpr std::uint32_t kCells = 256;
constexpr std::uint32_t kSmallestRing = 64 << 10;  // holds eight messages of kEagerBytes
constexpr std::uint32_t kLargestRing = 64 << 20;
// How many messages of one peer are taken before the others have their turn.
constexpr int kCellsPerTurn = 8;
// At so many rings a thread that waits looks before it looks at all there is, if it has no more peers than that: what
// comes meanwhile is seen sooner (8 B on two threads of a core 84 ns -> 79, between cores 315 -> 310).
constexpr std::size_t kRingsBefore = 4;
// How often descriptors are looked at while nobody sleeps.
constexpr int kCallsBetweenLooks = 256;
// What keeping a message takes beside its bytes.
constexpr std::size_t kBesideMessage = sizeof(Unexpected) + 32;

const std::byte* bytesOf(const void* data) { return static_cast<const std::byte*>(data); }

}  // namespace

Result<ShmOptions> ShmOptions::fromEnvironment() {
  ShmOptions options;
  const auto ring = byteSetting("FARANDOLE_SHM_RING_BYTES", options.ringBytes, kSmallestRing, kLargestRing);
  if (!ring) return ring.status();
  options.ringBytes = std::bit_floor(static_cast<std::uint32_t>(*ring));
  const auto singleCopy = choiceSetting("FARANDOLE_SHM_SINGLE_COPY", "auto", {"auto", "eager", "lazy", "off"});
  if (!singleCopy) return singleCopy.status();
  options.singleCopy = *singleCopy == "off"     ? SingleCopy::kOff
                       : *singleCopy == "lazy"  ? SingleCopy::kLazy
                       : *singleCopy == "eager" ? SingleCopy::kEager
                                                : SingleCopy::kAuto;
  const auto unexpected = unexpectedBytesSetting();
  if (!unexpected) return unexpected.status();
  options.unexpectedBytes = *unexpected;
  return options;
}

Result<std::unique_ptr<Transport>> ShmTransport::create(const ShmOptions& options) {
  std::unique_ptr<ShmTransport> transport(new ShmTransport(options));
  if (Status status = transport->open(); !status) {
    return Status::unavailable("shared memory cannot be used here (" + status.toString() + ")");
  }
  return std::unique_ptr<Transport>(std::move(transport));
}

ShmTransport::ShmTransport(const ShmOptions& options)
    : options_(options), shape_{kCells, std::max(kSmallestRing, std::bit_floor(options.ringBytes))} {}

void ShmTransport::send(PeerId peer, std::uint64_t tag, const void* data, std::size_t bytes, Request& request) {
  Link& link = links_[static_cast<std::uint32_t>(peer)];
  request.handle = nullptr;
  if (!link.failure) return request.finish(link.failure);
  if (link.isSelf) return sendToSelf(link, tag, bytesOf(data), bytes, request);
  if (bytes > kEagerBytes || link.writer.isHeldBack()) return offer(link, tag, bytesOf(data), bytes, request);
  request.status = Status::ok();
  const CellFields fields{.kind = CellKind::kEager, .tag = tag, .bytes = bytes};
  if (!link.backlog.empty() || !link.writer.write(fields, {bytesOf(data), bytes})) [[unlikely]]
    return enqueue(link, {fields, bytesOf(data), &request});
  wake(link);
  request.onDone(request);
}

void ShmTransport::recv(PeerId /*from*/, std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
                        Request& request) {
  request.status = Status::ok();
  request.handle = nullptr;
  request.data = static_cast<std::byte*>(data);
  request.capacity = bytes;
  request.wanted = tag;
  request.mask = mask;
  if (auto message = matcher_.takeMessage(tag, mask)) {
    accept(request, std::move(message));
  } else {
    matcher_.addReceive(request);
  }
}

bool ShmTransport::recvIfThere(std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes, Request& request) {
  auto message = matcher_.takeMessage(tag, mask);
  if (message == nullptr) return false;
  request.status = Status::ok();
  request.handle = nullptr;
  request.data = static_cast<std::byte*>(data);
  request.capacity = bytes;
  request.wanted = tag;
  accept(request, std::move(message));
  return true;
}

void ShmTransport::cancel(Request& request) {
  if (request.handle == &request) return;  // being received: the sender's memory is being read
  Outgoing* const outgoing = static_cast<Outgoing*>(request.handle);
  if (outgoing == nullptr && matcher_.removeReceive(request)) return request.finish(Status::aborted("cancelled"));
  const auto isIt = [&](const Queued& queued) {
    return outgoing == nullptr ? queued.request == &request
                               : queued.fields.kind == CellKind::kRendezvous && queued.fields.id == outgoing->id;
  };
  for (Link& link : links_) {
    if (outgoing != nullptr && outgoing->link != &link) continue;
    const auto queued = std::find_if(link.backlog.begin(), link.backlog.end(), isIt);
    if (queued == link.backlog.end()) continue;
    link.backlog.erase(queued);
    --numBacklogged_;
    if (outgoing != nullptr) release(*outgoing);
    return request.finish(Status::aborted("cancelled"));
  }
  // The peer knows of it: it answers that it forgot it, or goes on to receive it.
  if (outgoing != nullptr && !outgoing->link->isSelf) tell(*outgoing->link, CellKind::kRetract, outgoing->id);
  if (outgoing != nullptr && outgoing->link->isSelf && matcher_.dropRemote(outgoing->link->id, outgoing->id)) {
    finishOutgoing(*outgoing->link, outgoing->id, StatusCode::kAborted);
  }
}

bool ShmTransport::progress() {
  bool any = false;
  if (asleep_ || ++callsSinceLook_ >= kCallsBetweenLooks) any = pollDescriptors();
  for (std::size_t i = 0; i < incoming_.size(); ++i) any |= drain(*incoming_[i]);
  if (numBacklogged_ > 0) any |= flushBacklogs();
  if (freePulls_.size() < pulls_.size()) any |= advancePulls();
  if (!helped_.empty()) any |= helpSends(true);
  if (!gone_.empty()) failGone();
  return any;
}

bool ShmTransport::progressAgain() {
  const auto hasCome = [](const Link* link) { return link->reader.front() != nullptr; };
  for (std::size_t looks = incoming_.size(); looks <= kRingsBefore && looks > 0; looks += incoming_.size()) {
    if (std::any_of(incoming_.begin(), incoming_.end(), hasCome)) break;
  }
  return progress();
}

bool ShmTransport::arm() {
  asleep_ = true;
  door_->armed.store(isAtHand() ? kAsleepWaiting : kAsleep);
  // Whoever writes looks at the door after it has written: one of both sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bool isReady = isWorkLeft() || !gone_.empty() || (numBacklogged_ > 0 && flushBacklogs()) ||
                 (!helped_.empty() && helpSends(false));
  for (std::size_t i = 0; i < incoming_.size() && !isReady; ++i) isReady = incoming_[i]->reader.front() != nullptr;
  // A descriptor that became readable earlier makes no new event: a visitor would stay outside.
  pollfd descriptors{epoll_.get(), POLLIN, 0};
  isReady = isReady || poll(&descriptors, 1, 0) > 0;
  if (isReady) door_->armed.store(0, std::memory_order_relaxed);
  return !isReady;
}

void ShmTransport::deliver(Request& request, std::uint64_t tag, const std::byte* data, std::size_t bytes) {
  if (!request.noteSent(tag, bytes)) [[unlikely]] {
    request.status = Request::mismatch();
  } else if (bytes > 0) {
    std::memcpy(request.data, data, bytes);
  }
}

void ShmTransport::accept(Request& request, std::unique_ptr<Unexpected> message) {
  if (message->remote != nullptr) {
    pull(links_[message->peer], request, *message);
    matcher_.recycle(std::move(message));
    return;
  }
  deliver(request, message->tag, message->payload.data(), message->bytes);
  noteTaken(links_[message->peer], message->bytes);
  matcher_.recycle(std::move(message));
  request.onDone(request);
}

void ShmTransport::arrive(Link& link, std::uint64_t tag, const std::byte* data, std::size_t bytes) {
  if (isClosed(tag)) return;
  auto message = matcher_.makeMessage();
  message->tag = tag;
  message->bytes = bytes;
  message->peer = link.id;
  message->payload.assign(data, data + bytes);
  matcher_.addMessage(std::move(message));
  keep(link, bytes);
}

// Of collectives what is still with its sender stays there: those who call them tell each other better why they end.
void ShmTransport::closeGroup(std::uint32_t group, const std::vector<std::string_view>& /*members*/) {
  closedGroups_[group] = true;
  const auto isDropped = [&](const Unexpected& message) {
    return p2p::groupOf(message.tag) == group && (message.remote == nullptr || p2p::isPointToPoint(message.tag));
  };
  for (const auto& message : matcher_.takeIf(isDropped)) dropMessage(*message);
}

void ShmTransport::openGroup(std::uint32_t group) {
  closedGroups_[group] = false;
  const auto isOld = [&](const Unexpected& message) { return p2p::groupOf(message.tag) == group; };
  for (const auto& message : matcher_.takeIf(isOld)) dropMessage(*message);
}

void ShmTransport::dropMessage(const Unexpected& message) {
  Link& link = links_[message.peer];
  if (message.remote == nullptr) return noteTaken(link, message.bytes);
  if (link.isSelf) return finishOutgoing(link, message.remoteId, StatusCode::kPeerLeft);
  tellFinished(link, message.remoteId, StatusCode::kPeerLeft);
}

void ShmTransport::keep(Link& link, std::size_t bytes) {
  link.kept += bytes + kBesideMessage;
  if (link.kept > options_.unexpectedBytes && !link.isHeldBack) holdBack(link, true);
}

// Not before there is room for many: who sends on and on would pay for each change.
void ShmTransport::noteTaken(Link& link, std::size_t bytes) {
  link.kept -= bytes + kBesideMessage;
  if (link.isHeldBack && link.kept <= options_.unexpectedBytes / 2) holdBack(link, false);
}

void ShmTransport::holdBack(Link& link, bool holds) {
  link.isHeldBack = holds;
  if (!link.isSelf) link.reader.holdBack(holds);
}

void ShmTransport::sendToSelf(Link& link, std::uint64_t tag, const std::byte* data, std::size_t bytes,
                              Request& request) {
  request.status = Status::ok();
  if (Request* receive = matcher_.takeReceive(tag)) {
    deliver(*receive, tag, data, bytes);
    if (!receive->status) {
      request.status = receive->status;
      request.tag = receive->wanted;
      request.bytes = receive->capacity;
    }
    receive->onDone(*receive);
  } else if (bytes > kEagerBytes || link.isHeldBack) {
    return offer(link, tag, data, bytes, request);
  } else {
    arrive(link, tag, data, bytes);
  }
  request.onDone(request);
}

bool ShmTransport::write(Link& link, const Queued& item) {
  return link.writer.write(item.fields, {item.data, item.data != nullptr ? item.fields.bytes : 0});
}

// What is no message of its own: sends it at once, or in turn behind what waits for room already.
void ShmTransport::post(Link& link, const Queued& item) {
  if (!link.backlog.empty() || !write(link, item)) return enqueue(link, item);
  wake(link);
}

void ShmTransport::enqueue(Link& link, const Queued& item) {
  link.backlog.push_back(item);
  ++numBacklogged_;
}

void ShmTransport::tell(Link& link, CellKind kind, std::uint32_t id, std::uint64_t tag) {
  if (link.failure) post(link, {{.kind = kind, .tag = tag, .id = id}});
}

void ShmTransport::tellFinished(Link& link, std::uint32_t id, StatusCode code, Wanted wanted) {
  if (!link.failure) return;
  const auto slot = static_cast<std::uint16_t>(code);
  post(link, {{.kind = CellKind::kFinished, .tag = wanted.tag, .bytes = wanted.bytes, .id = id, .slot = slot}});
}

bool ShmTransport::flush(Link& link) {
  bool any = false;
  while (!link.backlog.empty()) {
    Queued& front = link.backlog.front();
    if (front.fields.kind == CellKind::kEager && link.writer.isHeldBack()) {
      front = makeOffer(link, front.fields.tag, front.data, front.fields.bytes, *front.request);
    }
    if (!write(link, front)) break;
    const Queued item = front;
    link.backlog.pop_front();
    --numBacklogged_;
    any = true;
    wake(link);
    if (item.fields.kind == CellKind::kEager) item.request->onDone(*item.request);
  }
  return any;
}

bool ShmTransport::flushBacklogs() {
  bool any = false;
  for (Link& link : links_) any |= !link.backlog.empty() && flush(link);
  return any;
}

bool ShmTransport::drain(Link& link) {
  int taken = 0;
  for (; taken < kCellsPerTurn; ++taken) {
    const Cell* const cell = link.reader.front();
    if (cell == nullptr) break;
    // Most are messages, and need no look at what else there is.
    cell->kind == CellKind::kEager ? receiveEager(link, *cell) : handle(link, *cell);
  }
  return taken > 0;
}

// The cell is popped before anybody is told: callbacks may progress the ring further. So too below.
void ShmTransport::receiveEager(Link& link, const Cell& cell) {
  const std::byte* const data = link.reader.payload(cell, cell.bytes).data();
  Request* const receive = matcher_.takeReceive(cell.tag);
  if (receive != nullptr) [[likely]] {
    deliver(*receive, cell.tag, data, cell.bytes);
  } else {
    arrive(link, cell.tag, data, cell.bytes);
  }
  if (link.reader.pop()) wake(link);
  if (receive != nullptr) receive->onDone(*receive);
}

void ShmTransport::receiveCarried(Link& link, const Cell& cell, Request& receive) {
  const Wanted wanted{receive.wanted, receive.capacity};
  const std::uint32_t id = cell.id;
  deliver(receive, cell.tag, link.reader.payload(cell, cell.bytes).data(), cell.bytes);
  if (link.reader.pop()) wake(link);
  tellFinished(link, id, receive.status.code(), wanted);
  receive.onDone(receive);
}

void ShmTransport::handle(Link& link, const Cell& cell) {
  const auto pop = [&] {
    if (link.reader.pop()) wake(link);
  };
  switch (cell.kind) {
    case CellKind::kEager: receiveEager(link, cell); break;
    case CellKind::kRendezvous: {
      Request* const receive = matcher_.takeReceive(cell.tag);
      if (receive != nullptr && cell.isOutOfLine()) return receiveCarried(link, cell, *receive);
      auto message = matcher_.makeMessage();
      message->tag = cell.tag;
      message->bytes = cell.bytes;
      message->peer = link.id;
      message->remoteId = cell.id;
      message->slot = cell.slot;
      message->remote = cell.elsewhere.address;
      pop();
      if (receive != nullptr) {
        accept(*receive, std::move(message));
      } else if (isClosed(message->tag) && p2p::isPointToPoint(message->tag)) {
        dropMessage(*message);
        matcher_.recycle(std::move(message));
      } else {
        matcher_.addMessage(std::move(message));
      }
      break;
    }
    case CellKind::kClear: {
      const std::uint32_t id = cell.id;
      const auto pull = static_cast<std::uint32_t>(cell.tag);
      pop();
      if (id < outgoing_.size() && outgoing_[id].request != nullptr && outgoing_[id].link == &link) {
        Outgoing& outgoing = outgoing_[id];
        outgoing.pull = pull;
        outgoing.isStreamed = true;
        if (outgoing.slot == kNoSlot) helped_.push_back(id);
      }
      break;
    }
    case CellKind::kFragment: receiveFragment(link, cell); break;
    case CellKind::kFinished: {
      const std::uint32_t id = cell.id;
      const auto code = static_cast<StatusCode>(cell.slot);
      const Wanted wanted{cell.tag, cell.bytes};
      pop();
      finishOutgoing(link, id, code, wanted);
      break;
    }
    case CellKind::kRetract: {
      const std::uint32_t id = cell.id;
      pop();
      if (matcher_.dropRemote(link.id, id)) {
        tellFinished(link, id, StatusCode::kAborted);
      }
      break;
    }
  }
}

std::string ShmTransport::describe(PeerId peer) const {
  const Link& link = links_[static_cast<std::uint32_t>(peer)];
  if (!link.failure) return "shm: " + link.failure.toString();
  if (link.isSelf) return "self";
  return canRead(link.reading) ? "shm: single copy" : "shm";
}

}  // namespace farandole::transport
