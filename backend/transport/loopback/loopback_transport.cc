#include "backend/transport/loopback/loopback_transport.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>

namespace farandole::transport {

namespace {

bool isWanted(std::uint64_t tag, std::uint64_t wanted, std::uint64_t mask) {
  return ((tag ^ wanted) & mask & p2p::kAnyElementMask) == 0;
}

Status destroyed() { return Status(StatusCode::kPeerFailed, "the loopback peer was destroyed"); }

}  // namespace

std::shared_ptr<LoopbackFabric> LoopbackFabric::create(std::size_t eagerBytes) {
  return std::shared_ptr<LoopbackFabric>(new LoopbackFabric(eagerBytes));
}

std::unique_ptr<Transport> LoopbackFabric::makeTransport() {
  std::lock_guard lock(mutex_);
  auto transport =
      std::make_unique<LoopbackTransport>(shared_from_this(), static_cast<std::uint32_t>(transports_.size()));
  transports_.push_back(transport.get());
  return transport;
}

LoopbackTransport::LoopbackTransport(std::shared_ptr<LoopbackFabric> fabric, std::uint32_t index)
    : fabric_(std::move(fabric)), index_(index), eventFd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

LoopbackTransport::~LoopbackTransport() {
  std::lock_guard lock(fabric_->mutex_);
  fabric_->transports_[index_] = nullptr;
  const Status gone(StatusCode::kPeerFailed, "loopback peer " + address() + " was destroyed");
  for (Incoming& incoming : unexpected_) {
    if (incoming.request != nullptr) incoming.sender->completeLocked(*incoming.request, gone);
  }
  for (LoopbackTransport* other : fabric_->transports_) {
    if (other == nullptr) continue;
    std::erase_if(other->unexpected_, [this](const Incoming& i) { return i.request != nullptr && i.sender == this; });
    other->failures_.push_back({PeerId{index_}, gone});
    other->signal();
  }
  close(eventFd_);
}

Result<PeerId> LoopbackTransport::connect(std::string_view address) {
  std::uint32_t index = 0;
  const auto [end, error] = std::from_chars(address.data(), address.data() + address.size(), index);
  std::lock_guard lock(fabric_->mutex_);
  if (error != std::errc() || end != address.data() + address.size() || index >= fabric_->transports_.size()) {
    return Status::invalidArgument("loopback address '" + std::string(address) + "': no such transport");
  }
  return PeerId{index};
}

Status LoopbackTransport::failure(PeerId peer) const {
  std::lock_guard lock(fabric_->mutex_);
  return fabric_->transports_[static_cast<std::uint32_t>(peer)] != nullptr ? Status::ok() : destroyed();
}

void LoopbackTransport::send(PeerId peer, std::uint64_t tag, const void* data, std::size_t bytes, Request& request) {
  std::unique_lock lock(fabric_->mutex_);
  request.status = Status::ok();
  LoopbackTransport* receiver = fabric_->transports_[static_cast<std::uint32_t>(peer)];
  if (receiver == nullptr) {
    completeLocked(request, destroyed());
    return;
  }
  Incoming incoming{tag, static_cast<const std::byte*>(data), bytes, {}, this, &request};
  const bool eager = bytes <= fabric_->eagerBytes_;
  auto posted = std::find_if(receiver->posted_.begin(), receiver->posted_.end(),
                             [&](const Posted& p) { return isWanted(tag, p.tag, p.mask); });
  if (posted != receiver->posted_.end()) {
    receiver->matchLocked(*posted, incoming);
    receiver->posted_.erase(posted);
    return;
  }
  if (eager) {
    incoming.copy.assign(incoming.data, incoming.data + bytes);
    incoming.request = nullptr;
  }
  receiver->unexpected_.push_back(std::move(incoming));
  if (eager) {
    lock.unlock();
    request.onDone(request);
  }
}

void LoopbackTransport::recv(PeerId /*from*/, std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
                             Request& request) {
  std::lock_guard lock(fabric_->mutex_);
  request.status = Status::ok();
  const Posted posted{tag, mask, static_cast<std::byte*>(data), bytes, &request};
  auto incoming = std::find_if(unexpected_.begin(), unexpected_.end(),
                               [&](const Incoming& i) { return isWanted(i.tag, tag, mask); });
  if (incoming == unexpected_.end()) {
    posted_.push_back(posted);
    return;
  }
  matchLocked(posted, *incoming);
  unexpected_.erase(incoming);
}

bool LoopbackTransport::recvIfThere(std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
                                    Request& request) {
  std::lock_guard lock(fabric_->mutex_);
  auto incoming = std::find_if(unexpected_.begin(), unexpected_.end(),
                               [&](const Incoming& i) { return isWanted(i.tag, tag, mask); });
  if (incoming == unexpected_.end()) return false;
  request.status = Status::ok();
  matchLocked({tag, mask, static_cast<std::byte*>(data), bytes, &request}, *incoming);
  unexpected_.erase(incoming);
  return true;
}

void LoopbackTransport::cancel(Request& request) {
  std::lock_guard lock(fabric_->mutex_);
  auto posted = std::find_if(posted_.begin(), posted_.end(), [&](const Posted& p) { return p.request == &request; });
  if (posted != posted_.end()) {
    posted_.erase(posted);
    completeLocked(request, Status::aborted("cancelled"));
  }
}

bool LoopbackTransport::progress() {
  std::deque<Request*> done;
  std::deque<Failure> failures;
  {
    std::lock_guard lock(fabric_->mutex_);
    done.swap(done_);
    failures.swap(failures_);
    std::uint64_t drained;
    [[maybe_unused]] const auto n = read(eventFd_, &drained, sizeof drained);
  }
  for (Request* request : done) request->onDone(*request);
  for (const Failure& failure : failures) {
    if (peerFailed_) peerFailed_(failure.peer, failure.status);
  }
  return !done.empty() || !failures.empty();
}

bool LoopbackTransport::arm() {
  std::lock_guard lock(fabric_->mutex_);
  return done_.empty() && failures_.empty();
}

void LoopbackTransport::signal() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = write(eventFd_, &one, sizeof one);
}

void LoopbackTransport::matchLocked(const Posted& posted, Incoming& incoming) {
  posted.request->wanted = posted.tag;
  posted.request->capacity = posted.bytes;
  const bool isWanted = posted.request->noteSent(incoming.tag, incoming.bytes);
  const Status status = isWanted ? Status::ok() : Request::mismatch();
  if (status && incoming.bytes > 0) {
    const std::byte* source = incoming.request != nullptr ? incoming.data : incoming.copy.data();
    std::memcpy(posted.data, source, incoming.bytes);
  }
  completeLocked(*posted.request, status);
  if (incoming.request == nullptr) return;
  incoming.request->tag = posted.tag;
  incoming.request->bytes = posted.bytes;
  incoming.sender->completeLocked(*incoming.request, status);
}

void LoopbackTransport::completeLocked(Request& request, Status status) {
  request.status = std::move(status);
  done_.push_back(&request);
  signal();
}

}  // namespace farandole::transport
