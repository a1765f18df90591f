#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/transport/transport.h"

namespace farandole::transport {

// Two transports as one: a local one for the peers of this host, and one for the
// network, which is opened only when a peer is elsewhere.
class RoutingTransport final : public Transport {
 public:
  using Open = std::function<Result<std::unique_ptr<Transport>>()>;

  // Without `local` everybody is reached over the network, which is then opened at once.
  static Result<std::unique_ptr<RoutingTransport>> create(std::unique_ptr<Transport> local, Open openNetwork);
  ~RoutingTransport() override = default;

  // Whether peers of the same host may use address(); else networkAddress() serves all.
  bool hasLocal() const { return local_ != nullptr; }
  // Opens the network's transport on first use.
  Result<std::string> networkAddress();

  std::string_view name() const override { return "routing"; }
  std::string address() const override;
  Result<PeerId> connect(std::string_view address) override;
  Status failure(PeerId peer) const override { return routeTo(peer).transport->failure(routeTo(peer).peer); }
  void onPeerFailed(PeerFailed handler) override { peerFailed_ = std::move(handler); }
  void drop(PeerId peer, const Status& why) override { routeTo(peer).transport->drop(routeTo(peer).peer, why); }
  void send(PeerId peer, std::uint64_t tag, const void* data, std::size_t bytes, Request& request) override;
  // From any peer: the oldest message of the local transport goes before the network's.
  void recv(PeerId from, std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
            Request& request) override;
  bool recvIfThere(std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes, Request& request) override;
  void noteReceived(PeerId from, std::size_t bytes) override {
    routeTo(from).transport->noteReceived(routeTo(from).peer, bytes);
  }
  void cancel(Request& request) override;
  bool progress() override { return progressRest(local_ != nullptr && local_->progress(), true); }
  void watchWaiter(const bool& hasWaiter) override {
    if (local_ != nullptr) local_->watchWaiter(hasWaiter);
  }
  bool progressAgain() override {
    return progressRest(local_ != nullptr && local_->progressAgain(),
                        isNetworkBusy_ || ++looksSinceNetwork_ >= kLooksPerNetworkLook);
  }
  int eventFd() const override { return epoll_.get(); }
  bool arm() override;
  Status shareMemory(PeerId peer, std::uint64_t key, int descriptor) override {
    return routeTo(peer).transport->shareMemory(routeTo(peer).peer, key, descriptor);
  }
  Result<Descriptor> takeSharedMemory(PeerId peer, std::uint64_t key) override {
    return routeTo(peer).transport->takeSharedMemory(routeTo(peer).peer, key);
  }
  Reading reading(PeerId peer) const override { return routeTo(peer).transport->reading(routeTo(peer).peer); }
  Status readMemory(PeerId peer, void* to, const void* from, std::size_t bytes) override {
    return routeTo(peer).transport->readMemory(routeTo(peer).peer, to, from, bytes);
  }
  void nudge(PeerId peer) override { routeTo(peer).transport->nudge(routeTo(peer).peer); }
  void leave() override;
  void closeGroup(std::uint32_t group, const std::vector<std::string_view>& members) override;
  void openGroup(std::uint32_t group) override;
  void signal() override { (local_ != nullptr ? local_ : network_)->signal(); }
  void look(std::chrono::steady_clock::time_point now) override {
    if (network_ != nullptr) network_->look(now);
  }
  std::string describe(PeerId peer) const override;

 private:
  // Looks at the shared memory for one at a network where nothing happens: that costs a
  // system call, 0.5 to 1 us over TCP.
  static constexpr int kLooksPerNetworkLook = 16;

  struct Route {
    Transport* transport;
    PeerId peer;
  };

  explicit RoutingTransport(Open openNetwork) : openNetwork_(std::move(openNetwork)) {}
  Status adopt(Transport& transport);
  Status openNetwork();
  PeerId peerFor(Transport& transport, PeerId peer);
  const Route& routeTo(PeerId peer) const { return routes_[static_cast<std::uint32_t>(peer)]; }
  bool receiveWaiting();
  // Whether a receive that waits may take what one with this tag wants.
  bool isWanted(std::uint64_t tag, std::uint64_t mask) const;
  // All but the shared memory, where something may have happened.
  bool progressRest(bool any, bool withNetwork);

  const Open openNetwork_;
  std::unique_ptr<Transport> local_;
  std::unique_ptr<Transport> network_;
  Descriptor epoll_;
  PeerFailed peerFailed_;
  std::vector<Route> routes_;  // by PeerId
  // For progressAgain().
  bool isNetworkBusy_ = false;
  int looksSinceNetwork_ = 0;
  // Receives from any peer, while there are two transports they can come from, and those that are behind them: they
  // look in both, in turn.
  struct Waiting {
    Request* request;
    PeerId from;
  };
  std::deque<Waiting> waiting_;
};

}  // namespace farandole::transport
