#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/transport/transport.h"

namespace farandole::transport {

class LoopbackTransport;

// Where the loopback transports of one process meet. Messages of up to
// `eagerBytes` are buffered; larger ones complete only when they are received,
// so that 0 gives pure rendezvous.
class LoopbackFabric : public std::enable_shared_from_this<LoopbackFabric> {
 public:
  static std::shared_ptr<LoopbackFabric> create(std::size_t eagerBytes);
  // Any thread. Transports find each other by address.
  std::unique_ptr<Transport> makeTransport();

 private:
  friend class LoopbackTransport;
  explicit LoopbackFabric(std::size_t eagerBytes) : eagerBytes_(eagerBytes) {}

  const std::size_t eagerBytes_;
  std::mutex mutex_;                            // guards all below and every transport's queues
  std::vector<LoopbackTransport*> transports_;  // by address; null once destroyed
};

// In-process transport for tests: deterministic matching, real completion on
// the progressing thread, no network.
class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<LoopbackFabric> fabric, std::uint32_t index);
  ~LoopbackTransport() override;

  std::string_view name() const override { return "loopback"; }
  std::string address() const override { return std::to_string(index_); }
  Result<PeerId> connect(std::string_view address) override;
  Status failure(PeerId peer) const override;
  void onPeerFailed(PeerFailed handler) override { peerFailed_ = std::move(handler); }
  void send(PeerId peer, std::uint64_t tag, const void* data, std::size_t bytes, Request& request) override;
  void recv(PeerId from, std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
            Request& request) override;
  bool recvIfThere(std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes, Request& request) override;
  void cancel(Request& request) override;
  bool progress() override;
  int eventFd() const override { return eventFd_; }
  bool arm() override;
  void leave() override { peerFailed_ = nullptr; }
  void signal() override;
  std::string describe(PeerId peer) const override { return "loopback"; }

 private:
  struct Incoming {
    std::uint64_t tag;
    const std::byte* data;
    std::size_t bytes;
    std::vector<std::byte> copy;  // of an eager message
    LoopbackTransport* sender;    // of a rendezvous message
    Request* request;
  };
  struct Posted {
    std::uint64_t tag;
    std::uint64_t mask;
    std::byte* data;
    std::size_t bytes;
    Request* request;
  };
  struct Failure {
    PeerId peer;
    Status status;
  };

  // All under the fabric's mutex.
  void matchLocked(const Posted& posted, Incoming& incoming);
  void completeLocked(Request& request, Status status);

  const std::shared_ptr<LoopbackFabric> fabric_;
  const std::uint32_t index_;
  const int eventFd_;
  PeerFailed peerFailed_;
  std::deque<Incoming> unexpected_;
  std::deque<Posted> posted_;
  std::deque<Request*> done_;
  std::deque<Failure> failures_;
};

}  // namespace farandole::transport
