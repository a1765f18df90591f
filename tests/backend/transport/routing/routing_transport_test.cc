#include "backend/transport/routing/routing_transport.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/p2p/message_tag.h"
#include "backend/transport/loopback/loopback_transport.h"

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

struct Received : Request {
  Received() {
    onDone = [](Request& request) { static_cast<Received&>(request).isDone = true; };
  }
  int value = 0;
  bool isDone = false;
};

// Receives take messages in the order in which they were posted, whomever they are from.
TEST(RoutingTransport, AReceiveFromAnyRankKeepsItsPlaceBeforeThoseFromOne) {
  for (const bool isOnHost : {true, false}) {
    const auto host = LoopbackFabric::create(64);
    const auto net = LoopbackFabric::create(64);
    const auto sender = (isOnHost ? host : net)->makeTransport();
    auto made = RoutingTransport::create(host->makeTransport(),
                                         [&] { return Result<std::unique_ptr<Transport>>(net->makeTransport()); });
    ASSERT_TRUE(made);
    RoutingTransport& routing = **made;
    ASSERT_TRUE(routing.networkAddress());
    const PeerId peer = routing.connect((isOnHost ? "L" : "N") + sender->address()).value();
    const std::string own = isOnHost ? routing.address() : routing.networkAddress().value();
    const PeerId back = sender->connect(own.substr(1)).value();
    const auto tag = p2p::makeTag(1, p2p::MessageKind::kPointToPoint, 3, 7);
    const auto other = p2p::makeTag(1, p2p::MessageKind::kPointToPoint, 3, 8);

    std::array<Received, 4> received;
    const auto post = [&](int index, PeerId from, std::uint64_t wanted, std::uint64_t mask) {
      routing.recv(from, wanted, mask, &received[index].value, sizeof(int), received[index]);
    };
    post(0, kAnyPeer, tag, p2p::kAnySourceMask);
    post(1, peer, tag, p2p::kExactMask);
    post(2, kAnyPeer, tag, p2p::kAnySourceMask);
    post(3, peer, other, p2p::kExactMask);
    std::array<Received, 4> sent;
    for (int i = 0; i < 4; ++i) {
      sent[i].value = i + 1;
      sender->send(back, i == 3 ? other : tag, &sent[i].value, sizeof(int), sent[i]);
    }
    for (int looks = 0; looks < 10; ++looks) routing.progress();
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(received[i].isDone && received[i].status) << i;
      EXPECT_EQ(received[i].value, i + 1) << isOnHost;
    }
  }
}

}  // namespace
}  // namespace farandole::transport
