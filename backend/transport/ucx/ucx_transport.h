#pragma once

#include <ucp/api/ucp.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backend/transport/transport.h"
#include "backend/transport/ucx/ucx_config.h"
#include "backend/transport/unexpected_bytes.h"

namespace farandole::transport {

// Networks, and what else UCX may use, through one UCX worker. Endpoints detect the death of their peer (error mode
// PEER).
// What ranks say to each other point to point and collectives have endpoints of
// their own, so that a small message does not queue behind megabytes.
//
// A send that UCX copies to its receiver at once is done before anybody wants it.
// So a receiver tells now and then how much it has received, and who is too far
// ahead of that sends synchronously: such a send is done when a receive has it.
class UcxTransport final : public Transport {
 public:
  // Fails with kUnavailable where UCX cannot start; the message says why.
  // `unexpectedBytes`: how far a sender may be ahead of its receiver; the same on both sides.
  static Result<std::unique_ptr<Transport>> create(UcxMemory memory = UcxMemory::kHost,
                                                   std::size_t unexpectedBytes = kUnexpectedBytes);
  ~UcxTransport() override;

  std::string_view name() const override { return "ucx"; }
  std::string address() const override { return address_; }
  Result<PeerId> connect(std::string_view address) override;
  Status failure(PeerId peer) const override { return peers_[static_cast<std::uint32_t>(peer)].failure; }
  void onPeerFailed(PeerFailed handler) override { peerFailed_ = std::move(handler); }
  void drop(PeerId peer, const Status& why) override;
  void send(PeerId peer, std::uint64_t tag, const void* data, std::size_t bytes, Request& request) override;
  void recv(PeerId from, std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
            Request& request) override;
  bool recvIfThere(std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes, Request& request) override;
  void noteReceived(PeerId from, std::size_t bytes) override;
  void cancel(Request& request) override;
  bool progress() override;
  int eventFd() const override { return eventFd_; }
  bool arm() override { return ucp_worker_arm(worker_) == UCS_OK; }
  // Closing the endpoints, or the end of the process, tells the peers. What was sent of devices leaves first: their
  // connections are made with the first message, which may be the last one.
  void leave() override;
  // What still comes for those that are over is looked for, most often for the latest ones.
  void closeGroup(std::uint32_t group, const std::vector<std::string_view>& members) override;
  void openGroup(std::uint32_t group) override;
  void signal() override { ucp_worker_signal(worker_); }
  void look(std::chrono::steady_clock::time_point now) override;
  std::string describe(PeerId peer) const override;

 private:
  // Names a transport to its peers: an address is one of these, and UCX's.
  using Token = std::uint64_t;

  static Token tokenOf(std::string_view address);

  struct Peer;
  struct Endpoint {
    Peer* peer;
    ucp_ep_h handle = nullptr;  // null until it is needed, and once dropped
    Status failure;
  };
  struct Peer {
    Peer(UcxTransport& transport, PeerId id, std::string_view address)
        : transport(transport), id(id), address(address) {}

    const ucp_address_t* ucxAddress() const {
      return reinterpret_cast<const ucp_address_t*>(address.data() + sizeof(Token));
    }
    // Nobody has connected to it, or tried to.
    bool isUntouched() const { return failure.isOk() && endpoints[0].failure.isOk() && endpoints[0].handle == nullptr; }

    UcxTransport& transport;
    const PeerId id;
    const std::string address;
    // The second one is made when it is first needed.
    std::array<Endpoint, 2> endpoints = {Endpoint{this, nullptr, {}}, Endpoint{this, nullptr, {}}};
    std::optional<bool> firstCarriesPointToPoint;  // known with the first message
    Status failure;                                // once all endpoints have failed, or one some time ago
    std::optional<std::chrono::steady_clock::time_point> brokenAt;  // the first of two
    std::size_t ahead = 0;                                          // bytes sent that it has not told to have received
    std::size_t received = 0;                                       // bytes that it has not been told of
  };

  UcxTransport(UcxMemory memory, std::size_t unexpectedBytes)
      : memoryType_(memory == UcxMemory::kHost ? UCS_MEMORY_TYPE_HOST : UCS_MEMORY_TYPE_UNKNOWN),
        unexpectedBytes_(unexpectedBytes) {}
  Status open(UcxMemory memory);

  Peer* findPeer(std::string_view address);
  Peer& addPeer(std::string_view address);
  Status open(Endpoint& endpoint);
  // Of the endpoint that carries such messages, with its handle.
  Result<ucp_ep_h> endpointFor(Peer& peer, std::uint64_t tag);
  std::vector<ucp_ep_h> handles() const;
  bool receiveIfThere(PeerId from, std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
                      Request& request);
  ucp_request_param_t requestParam(Request& request) const;
  ucp_request_param_t recvParam(Request& request, ucp_tag_recv_info_t& info) const;
  static Status received(Request& request, ucs_status_t status, const ucp_tag_recv_info_t& info);
  static void noteReceive(Request& request, ucs_status_ptr_t handle, const ucp_tag_recv_info_t& info);
  static void noteDone(Request& request);
  void tellDone();
  static void sendDone(void* request, ucs_status_t status, void* user);
  static void recvDone(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* user);

  // Receipts (ucx_receipts.cc).
  Status listenForReceipts();
  bool noteSent(Peer& peer, std::size_t bytes);
  void tellReceived(Peer& peer);
  static ucs_status_t receiptCame(void* arg, const void* header, std::size_t headerBytes, void* data, std::size_t bytes,
                                  const ucp_am_recv_param_t* param);
  static void receiptSent(void* handle, ucs_status_t status, void* user);

  // Cancelled receives (ucx_cancelled.cc).
  void endCancelled();
  // Whether the rest of what it has begun to send may never come.
  bool isGone(PeerId from) const;
  void forgetCancelled(const Request& request) {
    if (!cancelled_.empty()) std::erase(cancelled_, &request);
  }

  // Closed groups (ucx_closed_groups.cc).
  using Members = std::shared_ptr<const std::vector<PeerId>>;  // by their rank
  struct ClosedGroup {
    std::uint32_t group;
    Members members;
  };
  Members shared(std::vector<PeerId> members) const;
  void dropLateMessages();
  bool dropOldest(std::chrono::steady_clock::time_point until);
  // False when the time was over first.
  bool dropMessages(const ClosedGroup& closed, std::chrono::steady_clock::time_point until);
  void dropMessage(ucp_tag_message_h message, const ucp_tag_recv_info_t& info, const ClosedGroup& closed);

  static void endpointFailed(void* arg, ucp_ep_h handle, ucs_status_t status);

  const ucs_memory_type_t memoryType_;  // of what is sent and received; unknown: UCX looks
  const std::size_t unexpectedBytes_;
  Token token_ = 0;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int eventFd_ = -1;
  std::string address_;
  std::deque<Peer> peers_;  // by PeerId; UCX keeps pointers into it
  std::map<Token, Peer*> byToken_;
  std::vector<Peer*> owed_;  // a receipt, once UCX has progressed
  // What UCX completed while it progressed, in that order. A message that is sent from inside a
  // callback of UCX's overtakes those that UCX holds back for lack of room (seen over TCP).
  bool isProgressing_ = false;
  Request* done_ = nullptr;
  Request* lastDone_ = nullptr;
  std::vector<Request*> cancelled_;          // receives of which a part had come
  std::vector<std::shared_ptr<void>> kept_;  // what UCX may write to until the worker is destroyed
  PeerFailed peerFailed_;
  bool isAnyBroken_ = false;              // of a peer that has not failed
  std::deque<ClosedGroup> closedGroups_;  // whose number has not been taken again; the latest one is first
  std::size_t nextClosed_ = 0;            // to be looked at, of those that are not the latest
};

}  // namespace farandole::transport
