#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "backend/transport/nccl/device_visit.h"
#include "backend/transport/transport.h"

namespace farandole::backend {

// Another transport whose calls need CUDA: whichever thread makes them visits the device. UCX before 1.19 copies with
// the context that the thread has; a newer one takes the memory's.
class DeviceTransport final : public transport::Transport {
 public:
  DeviceTransport(std::unique_ptr<Transport> inner, const transport::CudaApi& cuda)
      : inner_(std::move(inner)), cuda_(cuda) {}
  ~DeviceTransport() override;

  // From the first message on: where it lies. With the transport held.
  void setDevice(int device) { device_ = device; }

  std::string_view name() const override { return inner_->name(); }
  std::string address() const override { return inner_->address(); }
  Result<transport::PeerId> connect(std::string_view address) override;
  Status failure(transport::PeerId peer) const override { return inner_->failure(peer); }
  void onPeerFailed(PeerFailed handler) override { inner_->onPeerFailed(std::move(handler)); }
  void send(transport::PeerId peer, std::uint64_t tag, const void* data, std::size_t bytes,
            transport::Request& request) override;
  void recv(transport::PeerId from, std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
            transport::Request& request) override;
  bool recvIfThere(std::uint64_t tag, std::uint64_t mask, void* data, std::size_t bytes,
                   transport::Request& request) override;
  void noteReceived(transport::PeerId from, std::size_t bytes) override;
  void cancel(transport::Request& request) override;
  void drop(transport::PeerId peer, const Status& why) override;
  void closeGroup(std::uint32_t group, const std::vector<std::string_view>& members) override;
  void openGroup(std::uint32_t group) override;
  void look(std::chrono::steady_clock::time_point now) override;
  bool progress() override;
  int eventFd() const override { return inner_->eventFd(); }
  bool arm() override;
  void leave() override;
  void signal() override { inner_->signal(); }
  std::string describe(transport::PeerId peer) const override { return inner_->describe(peer); }

 private:
  std::unique_ptr<Transport> inner_;
  const transport::CudaApi cuda_;
  int device_ = transport::DeviceVisit::kNone;
};

}  // namespace farandole::backend
