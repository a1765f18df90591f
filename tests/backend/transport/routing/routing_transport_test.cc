#include "backend/transport/routing/routing_transport.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace farandole::transport {
namespace {

// Has one peer, which fails when it is told to, and no messages.
class OnePeer final : public Transport {
 public:
  std::string_view name() const override { return "one"; }
  std::string address() const override { return "one"; }
  Result<PeerId> connect(std::string_view) override { return PeerId{0}; }
  Status failure(PeerId) const override { return Status::ok(); }
  void onPeerFailed(PeerFailed handler) override { peerFailed_ = std::move(handler); }
  void fail() { peerFailed_(PeerId{0}, Status::aborted("on purpose")); }
  void send(PeerId, std::uint64_t, const void*, std::size_t, Request&) override {}
  void recv(PeerId, std::uint64_t, std::uint64_t, void*, std::size_t, Request&) override {}
  bool recvIfThere(std::uint64_t, std::uint64_t, void*, std::size_t, Request&) override { return false; }
  void cancel(Request&) override {}
  bool progress() override { return false; }
  int eventFd() const override { return event_.get(); }
  bool arm() override { return true; }
  void leave() override {}
  void signal() override {}
  std::string describe(PeerId) const override { return "one"; }

 private:
  const Descriptor event_{eventfd(0, EFD_CLOEXEC)};
  PeerFailed peerFailed_;
};

TEST(RoutingTransport, TellsFailuresByItsOwnNumbers) {
  std::vector<PeerId> failed;
  OnePeer* network = nullptr;
  auto local = std::make_unique<OnePeer>();
  OnePeer* const onHost = local.get();
  auto routing = RoutingTransport::create(std::move(local), [&]() -> Result<std::unique_ptr<Transport>> {
    auto opened = std::make_unique<OnePeer>();
    network = opened.get();
    return std::unique_ptr<Transport>(std::move(opened));
  });
  ASSERT_TRUE(routing) << routing.status().toString();
  (*routing)->onPeerFailed([&](PeerId peer, const Status&) { failed.push_back(peer); });
  ASSERT_TRUE((*routing)->networkAddress());
  const Result<PeerId> there = (*routing)->connect("None");
  const Result<PeerId> here = (*routing)->connect("Lone");
  ASSERT_TRUE(here && there);

  onHost->fail();
  network->fail();
  EXPECT_EQ(failed, (std::vector{*here, *there}));
}

}  // namespace
}  // namespace farandole::transport
