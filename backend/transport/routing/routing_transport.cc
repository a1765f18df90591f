#include "backend/transport/routing/routing_transport.h"

#include <sys/epoll.h>

#include <algorithm>

namespace farandole::transport {
namespace {

constexpr char kLocal = 'L';
constexpr char kNetwork = 'N';

}  // namespace

Result<std::unique_ptr<RoutingTransport>> RoutingTransport::create(std::unique_ptr<Transport> local, Open openNetwork) {
  std::unique_ptr<RoutingTransport> routing(new RoutingTransport(std::move(openNetwork)));
  routing->epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  if (!routing->epoll_) return Status::unavailable("epoll_create1: no file descriptors are left");
  if (local != nullptr) {
    routing->local_ = std::move(local);
    FARANDOLE_RETURN_IF_ERROR(routing->adopt(*routing->local_));
  } else {
    FARANDOLE_RETURN_IF_ERROR(routing->openNetwork());
  }
  return routing;
}

Status RoutingTransport::openNetwork() {
  if (network_ != nullptr) return Status::ok();
  Result<std::unique_ptr<Transport>> network = openNetwork_();
  if (!network) return network.status();
  network_ = std::move(network).value();
  return adopt(*network_);
}

Status RoutingTransport::adopt(Transport& transport) {
  transport.onPeerFailed([this, &transport](PeerId peer, const Status& status) {
    if (peerFailed_) peerFailed_(peerFor(transport, peer), status);
  });
  epoll_event event = {};
  event.events = EPOLLIN;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, transport.eventFd(), &event) != 0)
    return Status::unavailable("epoll_ctl failed");
  return Status::ok();
}

PeerId RoutingTransport::peerFor(Transport& transport, PeerId peer) {
  const auto known = std::find_if(routes_.begin(), routes_.end(),
                                  [&](const Route& r) { return r.transport == &transport && r.peer == peer; });
  const auto index = static_cast<std::uint32_t>(known - routes_.begin());
  if (known == routes_.end()) routes_.push_back({&transport, peer});
  return PeerId{index};
}

std::string RoutingTransport::address() const {
  return local_ != nullptr ? kLocal + local_->address() : kNetwork + network_->address();
}

Result<std::string> RoutingTransport::networkAddress() {
  FARANDOLE_RETURN_IF_ERROR(openNetwork());
  return kNetwork + network_->address();
}

Result<PeerId> RoutingTransport::connect(std::string_view address) {
  Transport* const transport = address.starts_with(kLocal)     ? local_.get()
                               : address.starts_with(kNetwork) ? network_.get()
                                                               : nullptr;
  if (transport == nullptr) {
    return Status::invalidArgument("an address of " + std::to_string(address.size()) +
                                   " bytes is for no transport that is open here");
  }
  Result<PeerId> peer = transport->connect(address.substr(1));
  if (!peer) return peer;
  return peerFor(*transport, *peer);
}

void RoutingTransport::send(PeerId peer, std::uint64_t tag, const void* data, std::size_t bytes, Request& request) {
  const Route route = routeTo(peer);
  request.owner = route.transport;
  route.transport->send(route.peer, tag, data, bytes, request);
}

void RoutingTransport::recv(PeerId from, std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
                            Request& request) {
  const bool isBehind = !waiting_.empty() && isWanted(tag, mask);
  if (from != kAnyPeer && !isBehind) {
    const Route route = routeTo(from);
    request.owner = route.transport;
    route.transport->recv(route.peer, tag, mask, data, bytes, request);
  } else if (local_ == nullptr || network_ == nullptr) {
    request.owner = (local_ != nullptr ? local_ : network_).get();
    request.owner->recv(kAnyPeer, tag, mask, data, bytes, request);
  } else if (isBehind || !recvIfThere(tag, mask, data, bytes, request)) {
    request.owner = nullptr;
    request.status = Status::ok();
    request.data = static_cast<std::byte*>(data);
    request.capacity = bytes;
    request.wanted = tag;
    request.mask = mask;
    waiting_.push_back({&request, from});
  }
}

bool RoutingTransport::isWanted(std::uint64_t tag, std::uint64_t mask) const {
  return std::any_of(waiting_.begin(), waiting_.end(), [&](const Waiting& waiting) {
    return ((waiting.request->wanted ^ tag) & waiting.request->mask & mask & p2p::kAnyElementMask) == 0;
  });
}

bool RoutingTransport::recvIfThere(std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
                                   Request& request) {
  for (Transport* const transport : {local_.get(), network_.get()}) {
    if (transport == nullptr) continue;
    request.owner = transport;
    if (transport->recvIfThere(tag, mask, data, bytes, request)) return true;
  }
  return false;
}

void RoutingTransport::cancel(Request& request) {
  if (std::erase_if(waiting_, [&](const Waiting& one) { return one.request == &request; }) > 0)
    return request.finish(Status::aborted("cancelled"));
  if (request.owner != nullptr) request.owner->cancel(request);
}

bool RoutingTransport::receiveWaiting() {
  bool any = false;
  for (std::size_t i = 0; i < waiting_.size();) {
    const Waiting waiting = waiting_[i];
    Request& request = *waiting.request;
    // Taken out first: its callback may post further ones.
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    const std::size_t bytes = request.capacity;
    if (recvIfThere(request.wanted, request.mask, request.data, bytes, request)) {  // and it may be gone
      if (waiting.from != kAnyPeer) noteReceived(waiting.from, bytes);
      any = true;
    } else {
      waiting_.insert(waiting_.begin() + static_cast<std::ptrdiff_t>(i++), waiting);
    }
  }
  return any;
}

bool RoutingTransport::progressRest(bool any, bool withNetwork) {
  if (network_ != nullptr && (withNetwork || local_ == nullptr)) {
    looksSinceNetwork_ = 0;
    isNetworkBusy_ = network_->progress();
    any |= isNetworkBusy_;
  }
  if (!waiting_.empty()) any |= receiveWaiting();
  return any;
}

bool RoutingTransport::arm() {
  return (local_ == nullptr || local_->arm()) && (network_ == nullptr || network_->arm());
}

void RoutingTransport::leave() {
  if (local_ != nullptr) local_->leave();
  if (network_ != nullptr) network_->leave();
}

void RoutingTransport::closeGroup(std::uint32_t group, const std::vector<std::string_view>& members) {
  if (local_ != nullptr) local_->closeGroup(group, {});  // which knows its peers
  if (network_ == nullptr) return;
  std::vector<std::string_view> there;
  there.reserve(members.size());
  for (const std::string_view member : members) {
    there.push_back(member.starts_with(kNetwork) ? member.substr(1) : std::string_view{});
  }
  network_->closeGroup(group, there);
}

void RoutingTransport::openGroup(std::uint32_t group) {
  if (local_ != nullptr) local_->openGroup(group);
  if (network_ != nullptr) network_->openGroup(group);
}

std::string RoutingTransport::describe(PeerId peer) const {
  const Route& route = routeTo(peer);
  return route.transport->describe(route.peer);
}

}  // namespace farandole::transport
