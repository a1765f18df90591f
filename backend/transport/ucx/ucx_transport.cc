#include "backend/transport/ucx/ucx_transport.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "backend/p2p/message_tag.h"
#include "backend/transport/ucx/ucx_closing.h"

namespace farandole::transport {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kMostForLastWords = std::chrono::milliseconds(10);
// Between the ends of a peer's connections when it has ended.
constexpr auto kMostBetweenEnds = std::chrono::seconds(2);

}  // namespace

ucp_request_param_t UcxTransport::requestParam(Request& request) const {
  ucp_request_param_t param;
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.user_data = &request;
  param.memory_type = memoryType_;
  return param;
}

Result<std::unique_ptr<Transport>> UcxTransport::create(UcxMemory memory, std::size_t unexpectedBytes) {
  std::unique_ptr<UcxTransport> transport(new UcxTransport(memory, unexpectedBytes));
  if (Status status = transport->open(memory); !status) {
    return Status::unavailable("UCX cannot be used here (" + status.toString() + ")");
  }
  return std::unique_ptr<Transport>(std::move(transport));
}

Status UcxTransport::open(UcxMemory memory) {
  FARANDOLE_RETURN_IF_ERROR(checkUcxVersion());
  Result<ucp_config_t*> config = readUcxConfig(memory);
  if (!config) return config.status();

  ucp_params_t params = {};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_TAG | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "farandole";
  ucs_status_t status = ucp_init(&params, *config, &context_);
  ucp_config_release(*config);
  if (status != UCS_OK) return ucxError("ucp_init", status);
  if (memory == UcxMemory::kCuda) FARANDOLE_RETURN_IF_ERROR(checkCudaMemory(context_));

  ucp_worker_params_t workerParams = {};
  workerParams.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS;
  workerParams.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  workerParams.flags = UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK;  // of receives that only the worker's end has ended
  status = ucp_worker_create(context_, &workerParams, &worker_);
  if (status != UCS_OK) return ucxError("ucp_worker_create", status);

  status = ucp_worker_get_efd(worker_, &eventFd_);
  if (status != UCS_OK) return ucxError("ucp_worker_get_efd", status);

  ucp_address_t* address = nullptr;
  std::size_t length = 0;
  status = ucp_worker_get_address(worker_, &address, &length);
  if (status != UCS_OK) return ucxError("ucp_worker_get_address", status);
  if (getrandom(&token_, sizeof token_, 0) != sizeof token_) return Status::unavailable("getrandom failed");
  address_.assign(reinterpret_cast<const char*>(&token_), sizeof token_);
  address_.append(reinterpret_cast<const char*>(address), length);
  ucp_worker_release_address(worker_, address);
  return listenForReceipts();
}

UcxTransport::~UcxTransport() {
  peerFailed_ = nullptr;
  if (worker_ != nullptr) {
    if (!closeEndpoints(worker_, handles())) {  // a leak: better than a crash
      new (std::nothrow) auto(std::move(kept_));
      return;
    }
    ucp_worker_destroy(worker_);
  }
  if (context_ != nullptr) ucp_cleanup(context_);
}

std::vector<ucp_ep_h> UcxTransport::handles() const {
  std::vector<ucp_ep_h> handles;
  handles.reserve(peers_.size());
  for (const Peer& peer : peers_) {
    for (const Endpoint& endpoint : peer.endpoints) {
      if (endpoint.handle != nullptr) handles.push_back(endpoint.handle);
    }
  }
  return handles;
}

void UcxTransport::leave() {
  peerFailed_ = nullptr;  // others may end before this process does
  if (memoryType_ == UCS_MEMORY_TYPE_HOST) return;
  flushEndpoints(handles(), [this] { (void)progress(); });
}

Result<PeerId> UcxTransport::connect(std::string_view address) {
  if (address.size() <= sizeof(Token)) {
    return Status::invalidArgument("the address of " + std::to_string(address.size()) + " bytes is none of UCX");
  }
  Peer* const known = findPeer(address);
  Peer& peer = known != nullptr && known->isUntouched() ? *known : addPeer(address);
  FARANDOLE_RETURN_IF_ERROR(open(peer.endpoints[0]));
  return peer.id;
}

UcxTransport::Token UcxTransport::tokenOf(std::string_view address) {
  Token token;
  std::memcpy(&token, address.data(), sizeof token);
  return token;
}

UcxTransport::Peer* UcxTransport::findPeer(std::string_view address) {
  const auto known = byToken_.find(tokenOf(address));
  return known == byToken_.end() ? nullptr : known->second;
}

UcxTransport::Peer& UcxTransport::addPeer(std::string_view address) {
  const PeerId id{static_cast<std::uint32_t>(peers_.size())};
  Peer& peer = peers_.emplace_back(*this, id, address);
  byToken_[tokenOf(address)] = &peer;
  return peer;
}

Status UcxTransport::open(Endpoint& endpoint) {
  ucp_ep_params_t params = {};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = endpoint.peer->ucxAddress();
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &UcxTransport::endpointFailed;
  params.err_handler.arg = &endpoint;
  if (const ucs_status_t status = ucp_ep_create(worker_, &params, &endpoint.handle); status != UCS_OK) {
    endpoint.handle = nullptr;
    return ucxError("ucp_ep_create", status);
  }
  return Status::ok();
}

Result<ucp_ep_h> UcxTransport::endpointFor(Peer& peer, std::uint64_t tag) {
  if (!peer.failure) return peer.failure;
  const bool isPointToPoint = p2p::isPointToPoint(tag);
  if (!peer.firstCarriesPointToPoint) peer.firstCarriesPointToPoint = isPointToPoint;
  Endpoint& endpoint = peer.endpoints[*peer.firstCarriesPointToPoint == isPointToPoint ? 0 : 1];
  if (!endpoint.failure) return endpoint.failure;
  if (endpoint.handle == nullptr) FARANDOLE_RETURN_IF_ERROR(open(endpoint));
  return endpoint.handle;
}

void UcxTransport::drop(PeerId id, const Status& why) {
  Peer& peer = peers_[static_cast<std::uint32_t>(id)];
  if (std::ranges::none_of(peer.endpoints, [](const Endpoint& one) { return one.handle != nullptr; })) return;
  const bool isNews = peer.failure.isOk();
  peer.failure = why;  // first: what is told below may want to send to the dead
  // What it had sent and is here already would find no endpoint later: UCX would make one, to a process that is gone.
  for (const auto end = Clock::now() + kMostForLastWords; progress() && Clock::now() < end;) {
  }
  isProgressing_ = true;
  for (Endpoint& endpoint : peer.endpoints) {
    endpoint.failure = why;
    if (endpoint.handle != nullptr) discardEndpoint(std::exchange(endpoint.handle, nullptr));
  }
  isProgressing_ = false;
  tellDone();
  if (isNews && peerFailed_) peerFailed_(id, why);
}

void UcxTransport::send(PeerId peer, std::uint64_t tag, const void* data, std::size_t bytes, Request& request) {
  Peer& to = peers_[static_cast<std::uint32_t>(peer)];
  const Result<ucp_ep_h> endpoint = endpointFor(to, tag);
  request.owner = this;
  request.status = endpoint.status();
  request.order = static_cast<std::uint32_t>(peer);
  if (!endpoint) {
    request.onDone(request);
    return;
  }
  ucp_request_param_t param = requestParam(request);
  param.cb.send = &UcxTransport::sendDone;
  const auto post = noteSent(to, bytes) ? ucp_tag_send_sync_nbx : ucp_tag_send_nbx;
  const ucs_status_ptr_t handle = post(*endpoint, data, bytes, tag, &param);
  if (UCS_PTR_IS_PTR(handle)) {
    request.handle = handle;
    return;
  }
  if (handle != nullptr) request.status = ucxError("send", UCS_PTR_STATUS(handle));
  request.onDone(request);
}

void UcxTransport::recv(PeerId from, std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
                        Request& request) {
  // Of a message that is there and does not fit, a receive is not told what it is; a look at it first is.
  if (receiveIfThere(from, tag, mask, data, bytes, request)) return;
  ucp_tag_recv_info_t info;
  const ucp_request_param_t param = recvParam(request, info);
  noteReceive(request, ucp_tag_recv_nbx(worker_, data, bytes, tag, mask, &param), info);
}

bool UcxTransport::recvIfThere(std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes, Request& request) {
  return receiveIfThere(kAnyPeer, tag, mask, data, bytes, request);
}

bool UcxTransport::receiveIfThere(PeerId from, std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
                                  Request& request) {
  request.owner = this;
  request.order = static_cast<std::uint32_t>(from);
  request.status = Status::ok();
  request.wanted = tag;
  request.capacity = bytes;
  ucp_tag_recv_info_t info;
  const ucp_tag_message_h message = ucp_tag_probe_nb(worker_, tag, mask, 1, &info);
  if (message == nullptr) return false;
  const ucp_request_param_t param = recvParam(request, info);
  noteReceive(request, ucp_tag_msg_recv_nbx(worker_, data, bytes, message, &param), info);
  return true;
}

ucp_request_param_t UcxTransport::recvParam(Request& request, ucp_tag_recv_info_t& info) const {
  ucp_request_param_t param = requestParam(request);
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_RECV_INFO;
  param.cb.recv = &UcxTransport::recvDone;
  param.recv_info.tag_info = &info;
  return param;
}

void UcxTransport::noteReceive(Request& request, ucs_status_ptr_t handle, const ucp_tag_recv_info_t& info) {
  if (UCS_PTR_IS_PTR(handle)) {
    request.handle = handle;
    return;
  }
  request.status = received(request, UCS_PTR_STATUS(handle), info);
  request.onDone(request);
}

// UCX tells what was sent also where it did not fit.
Status UcxTransport::received(Request& request, ucs_status_t status, const ucp_tag_recv_info_t& info) {
  if (status != UCS_OK && status != UCS_ERR_MESSAGE_TRUNCATED) return ucxError("receive", status);
  const PeerId from{static_cast<std::uint32_t>(request.order)};
  if (from != kAnyPeer) request.owner->noteReceived(from, info.length);
  return request.noteSent(info.sender_tag, info.length) ? Status::ok() : Request::mismatch();
}

std::string UcxTransport::describe(PeerId id) const {
  const Peer& peer = peers_[static_cast<std::uint32_t>(id)];
  if (!peer.failure) return "ucx: " + peer.failure.toString();
  std::array<ucp_transport_entry_t, 16> entries = {};
  ucp_ep_attr_t attributes = {};
  attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attributes.transports.entries = entries.data();
  attributes.transports.num_entries = entries.size();
  attributes.transports.entry_size = sizeof(ucp_transport_entry_t);
  if (ucp_ep_query(peer.endpoints[0].handle, &attributes) != UCS_OK) return "ucx";
  std::string text = "ucx:";
  for (unsigned i = 0; i < attributes.transports.num_entries; ++i) {
    text += std::string(i == 0 ? " " : ", ") + entries[i].transport_name;
    if (std::string_view(entries[i].device_name) != "memory") text += std::string("/") + entries[i].device_name;
  }
  return text;
}

void UcxTransport::noteDone(Request& request) {
  auto& self = static_cast<UcxTransport&>(*request.owner);
  if (!self.isProgressing_) return request.onDone(request);
  request.next = nullptr;
  (self.done_ == nullptr ? self.done_ : self.lastDone_->next) = &request;
  self.lastDone_ = &request;
}

bool UcxTransport::progress() {
  isProgressing_ = true;
  const bool any = ucp_worker_progress(worker_) != 0;
  isProgressing_ = false;
  while (!owed_.empty()) {
    tellReceived(*owed_.back());
    owed_.pop_back();
  }
  tellDone();
  return any;
}

void UcxTransport::tellDone() {
  while (done_ != nullptr) {
    Request& request = *std::exchange(done_, done_->next);
    request.onDone(request);
  }
}

void UcxTransport::sendDone(void* handle, ucs_status_t status, void* user) {
  Request& request = *static_cast<Request*>(user);
  if (status != UCS_OK) {
    // What was given up for the peer's end is said to be cancelled.
    const Status& failure = static_cast<UcxTransport&>(*request.owner).peers_[request.order].failure;
    request.status = failure ? ucxError("send", status) : failure;
  }
  request.handle = nullptr;
  ucp_request_free(handle);
  noteDone(request);
}

void UcxTransport::recvDone(void* handle, ucs_status_t status, const ucp_tag_recv_info_t* info, void* user) {
  Request& request = *static_cast<Request*>(user);
  request.status = received(request, status, *info);
  request.handle = nullptr;
  static_cast<UcxTransport&>(*request.owner).forgetCancelled(request);
  ucp_request_free(handle);
  noteDone(request);
}

// What came before the end of one connection has been received, and of the other one not yet: a peer that has ended,
// ends both. Where it has not, what was on its way is lost all the same, and who waits for it waits in vain.
void UcxTransport::endpointFailed(void* arg, ucp_ep_h handle, ucs_status_t status) {
  Endpoint& endpoint = *static_cast<Endpoint*>(arg);
  if (!endpoint.failure) return;
  endpoint.failure =
      Status(StatusCode::kPeerLeft, std::string("the connection broke (") + ucs_status_string(status) + ")");
  Peer& peer = *endpoint.peer;
  if (!peer.failure) return;  // it is being dropped, and told by that
  for (const Endpoint& one : peer.endpoints) {
    if (one.handle == nullptr || !one.failure) continue;
    peer.brokenAt = Clock::now();
    peer.transport.isAnyBroken_ = true;
    return;
  }
  peer.failure = endpoint.failure;
  if (peer.transport.peerFailed_) peer.transport.peerFailed_(peer.id, peer.failure);
}

void UcxTransport::look(Clock::time_point now) {
  dropLateMessages();
  endCancelled();
  if (!std::exchange(isAnyBroken_, false)) return;
  for (std::size_t i = 0; i < peers_.size(); ++i) {  // who is told may connect to further ones
    Peer& peer = peers_[i];
    if (!peer.failure || !peer.brokenAt) continue;
    if (now - *peer.brokenAt < kMostBetweenEnds) {
      isAnyBroken_ = true;
      continue;
    }
    const auto broken = std::ranges::find_if(peer.endpoints, [](const Endpoint& one) { return !one.failure; });
    const Status why = broken->failure;
    drop(peer.id, why);
  }
}

}  // namespace farandole::transport
