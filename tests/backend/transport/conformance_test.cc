// What every transport must do, run over each of them.
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>

#include "backend/p2p/message_tag.h"
#include "backend/transport/loopback/loopback_transport.h"
#include "backend/transport/routing/routing_transport.h"
#include "backend/transport/shm/shm_transport.h"
#include "backend/transport/transport.h"
#include "backend/transport/ucx/ucx_transport.h"

namespace farandole::transport {
namespace {

using namespace std::chrono_literals;

// Makes transports that can talk to each other.
struct Kind {
  std::string name;
  std::function<std::function<std::unique_ptr<Transport>()>()> makeFactory;
  // From how many bytes on a sender is told that its receiver wants another message.
  std::size_t answersFrom;
};

std::function<std::unique_ptr<Transport>()> loopbackFactory(std::size_t eagerBytes) {
  auto fabric = LoopbackFabric::create(eagerBytes);
  return [fabric] { return fabric->makeTransport(); };
}

std::unique_ptr<Transport> makeUcx() {
  auto transport = UcxTransport::create(UcxReach::kEverybody);
  if (!transport) throw std::runtime_error(transport.status().toString());
  return std::move(transport).value();
}

std::function<std::unique_ptr<Transport>()> shmFactory(const ShmOptions& options) {
  return [options] {
    auto transport = ShmTransport::create(options);
    if (!transport) throw std::runtime_error(transport.status().toString());
    return std::move(transport).value();
  };
}

// With both transports open.
std::unique_ptr<Transport> makeRouted() {
  auto routing = RoutingTransport::create(shmFactory({})(), [] { return UcxTransport::create(UcxReach::kOtherHosts); });
  if (!routing) throw std::runtime_error(routing.status().toString());
  if (auto network = (*routing)->networkAddress(); !network) throw std::runtime_error(network.status().toString());
  return std::move(routing).value();
}

struct Tracked : Request {
  bool done = false;
  Tracked() {
    onDone = [](Request& request) { static_cast<Tracked&>(request).done = true; };
  }
};

class TransportConformance : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    auto make = GetParam().makeFactory();
    a_ = make();
    b_ = make();
    Result<PeerId> peer = a_->connect(b_->address());
    ASSERT_TRUE(peer) << peer.status().toString();
    b_of_a_ = *peer;
    peer = b_->connect(a_->address());
    ASSERT_TRUE(peer);
    a_of_b_ = *peer;
  }

  bool progressUntil(const std::function<bool()>& done, std::chrono::milliseconds limit = 10s) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!done() && std::chrono::steady_clock::now() < end) {
      a_->progress();
      b_->progress();
    }
    return done();
  }

  bool waits_[2] = {true, true};
  std::unique_ptr<Transport> a_;
  std::unique_ptr<Transport> b_;
  PeerId b_of_a_{};
  PeerId a_of_b_{};
};

TEST_P(TransportConformance, MovesMessagesOfEverySizeWhicheverSideIsFirst) {
  for (const std::size_t bytes : {0ul, 1ul, 8ul, 4095ul, 8192ul, 65537ul, 5'000'000ul}) {
    for (const bool recvFirst : {false, true}) {
      SCOPED_TRACE(std::to_string(bytes) + (recvFirst ? " recv first" : " send first"));
      std::vector<unsigned char> out(bytes);
      std::iota(out.begin(), out.end(), static_cast<unsigned char>(bytes));
      std::vector<unsigned char> in(bytes);
      Tracked send;
      Tracked recv;
      const auto post = [&](bool isRecv) {
        if (isRecv) {
          b_->recv(a_of_b_, 17, p2p::kExactMask, in.data(), bytes, recv);
        } else {
          a_->send(b_of_a_, 17, out.data(), bytes, send);
        }
      };
      post(recvFirst);
      progressUntil([] { return false; }, 2ms);
      post(!recvFirst);
      ASSERT_TRUE(progressUntil([&] { return send.done && recv.done; }));
      EXPECT_TRUE(send.status) << send.status.toString();
      EXPECT_TRUE(recv.status) << recv.status.toString();
      EXPECT_EQ(recv.bytes, bytes);
      EXPECT_EQ(recv.tag, 17u);
      EXPECT_EQ(in, out);
    }
  }
}

// Who sends may be at hand, look now and then, or leave it to a loop.
TEST_P(TransportConformance, LargeMessagesComeWholeHoweverTheSidesTakeTurns) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto upTo = [&](std::size_t last) { return std::uniform_int_distribution<std::size_t>(0, last)(random); };
  struct Passing {
    std::vector<unsigned char> out;
    std::vector<unsigned char> in;
    Tracked send;
    Tracked recv;
  };
  a_->watchWaiter(waits_[0]);
  b_->watchWaiter(waits_[1]);
  for (int round = 0; round < 25; ++round) {
    std::vector<Passing> messages(1 + upTo(4));
    for (std::size_t i = 0; i < messages.size(); ++i) {
      Passing& m = messages[i];
      m.out.resize(60'000 + upTo(round % 5 == 0 ? 12'000'000 : 400'000));
      for (std::size_t at = 0; at < m.out.size(); ++at) m.out[at] = static_cast<unsigned char>(at * 7 + (at >> 13) + i);
      m.in.resize(m.out.size());
      Transport& from = i % 2 == 0 ? *a_ : *b_;
      Transport& to = i % 2 == 0 ? *b_ : *a_;
      to.recv(i % 2 == 0 ? a_of_b_ : b_of_a_, i, p2p::kExactMask, m.in.data(), m.in.size(), m.recv);
      from.send(i % 2 == 0 ? b_of_a_ : a_of_b_, i, m.out.data(), m.out.size(), m.send);
    }
    const std::size_t share = 1 + upTo(99);
    const auto end = std::chrono::steady_clock::now() + 20s;
    const auto isDone = [](const Passing& m) { return m.send.done && m.recv.done; };
    while (!std::ranges::all_of(messages, isDone) && std::chrono::steady_clock::now() < end) {
      if (upTo(20) == 0) waits_[upTo(1)] = upTo(1) == 0;
      Transport& next = upTo(100) < share ? *a_ : *b_;
      for (std::size_t calls = upTo(200); calls > 0; --calls) next.progress();
    }
    for (const Passing& m : messages) {
      ASSERT_TRUE(isDone(m)) << "round " << round << ", " << m.out.size() << " bytes";
      EXPECT_TRUE(m.send.status) << m.send.status.toString();
      EXPECT_TRUE(m.recv.status) << m.recv.status.toString();
      EXPECT_TRUE(m.in == m.out) << "round " << round << ", " << m.out.size() << " bytes";
    }
  }
}

TEST_P(TransportConformance, MatchesByTagAndKeepsTheOrderOfEqualTags) {
  std::mt19937_64 random(11);
  constexpr int kMessages = 300;
  std::vector<std::vector<int>> out(kMessages);
  std::vector<std::vector<int>> in(kMessages);
  std::vector<Tracked> sends(kMessages);
  std::vector<Tracked> recvs(kMessages);
  std::vector<std::uint64_t> tags(kMessages);
  std::vector<int> recvOrder(kMessages);
  std::iota(recvOrder.begin(), recvOrder.end(), 0);
  for (int i = 0; i < kMessages; ++i) {
    tags[i] = random() % 5;
    out[i].assign(1 + random() % 20000, i);
    in[i].assign(out[i].size(), -1);
  }
  // Receives are posted tag by tag, in order inside a tag.
  std::stable_sort(recvOrder.begin(), recvOrder.end(), [&](int x, int y) { return tags[x] > tags[y]; });
  for (int i = 0; i < kMessages; ++i) {
    a_->send(b_of_a_, tags[i], out[i].data(), out[i].size() * sizeof(int), sends[i]);
    if (i % 7 == 0) b_->progress();
  }
  for (const int i : recvOrder) {
    b_->recv(a_of_b_, tags[i], p2p::kExactMask, in[i].data(), in[i].size() * sizeof(int), recvs[i]);
  }
  ASSERT_TRUE(progressUntil([&] {
    return std::all_of(recvs.begin(), recvs.end(), [](const Tracked& r) { return r.done; }) &&
           std::all_of(sends.begin(), sends.end(), [](const Tracked& r) { return r.done; });
  }));
  for (int i = 0; i < kMessages; ++i) {
    EXPECT_TRUE(recvs[i].status) << recvs[i].status.toString();
    EXPECT_EQ(in[i], out[i]);
  }
}

TEST_P(TransportConformance, ReceivesFromAnySourceByMask) {
  const int value = 42;
  int in = 0;
  Tracked send;
  Tracked recv;
  b_->recv(kAnyPeer, p2p::makeTag(3, p2p::MessageKind::kPointToPoint, 0, 9), p2p::kAnySourceMask, &in, sizeof in, recv);
  a_->send(b_of_a_, p2p::makeTag(3, p2p::MessageKind::kPointToPoint, 5, 9), &value, sizeof value, send);
  ASSERT_TRUE(progressUntil([&] { return send.done && recv.done; }));
  EXPECT_EQ(in, 42);
  EXPECT_EQ(p2p::sourceOf(recv.tag), 5);
}

TEST_P(TransportConformance, ReceivesIfThereOnlyWhatIsThere) {
  for (const std::size_t bytes : {8ul, 100'000ul}) {
    std::vector<char> out(bytes, 'y');
    std::vector<char> in(bytes);
    Tracked send;
    Tracked recv;
    EXPECT_FALSE(b_->recvIfThere(8, p2p::kExactMask, in.data(), bytes, recv));
    a_->send(b_of_a_, 8, out.data(), bytes, send);
    EXPECT_FALSE(b_->recvIfThere(9, p2p::kExactMask, in.data(), bytes, recv));
    bool posted = false;
    ASSERT_TRUE(progressUntil([&] {
      posted = posted || b_->recvIfThere(8, p2p::kExactMask, in.data(), bytes, recv);
      return send.done && recv.done;
    }));
    EXPECT_TRUE(recv.status) << recv.status.toString();
    EXPECT_EQ(recv.bytes, bytes);
    EXPECT_EQ(in, out);
  }
}

// One side of a message, with what it takes it to be.
struct Side {
  std::size_t bytes;
  std::uint32_t element;
};

TEST_P(TransportConformance, AMessageOfAnotherSizeOrElementIsAnErrorAndNothingElse) {
  const std::vector<std::pair<Side, Side>> cases = {
      {{64, 7}, {16, 7}},
      {{16, 7}, {64, 7}},
      {{64, 7}, {64, 4}},
      {{0, 1}, {0, 2}},
      {{0, 7}, {16, 7}},
      {{16, 7}, {0, 7}},
      {{8192, 1}, {8192, 2}},
      {{40'000, 7}, {40'000, 4}},
      {{1'000'000, 7}, {16, 7}},
      {{16, 7}, {1'000'000, 7}},
      {{100'000, 7}, {8, 63}},
      {{1'000'000, 7}, {0, 7}},
      {{1'000'000, 7}, {999'999, 7}},
      {{1'000'000, 1}, {1'000'000, 2}},
      {{3'000'000, 1}, {3'000'000, 0}},
  };
  for (const std::uint64_t mask : {p2p::kAnyElementMask, p2p::kAnySourceMask}) {
    for (const auto& [sent, wanted] : cases) {
      for (const bool recvFirst : {false, true}) {
        SCOPED_TRACE(std::to_string(sent.bytes) + " bytes of " + std::to_string(sent.element) + " for " +
                     std::to_string(wanted.bytes) + " of " + std::to_string(wanted.element) +
                     (recvFirst ? ", recv first" : ", send first"));
        const auto tagOf = [](std::uint32_t element, std::uint32_t tag) {
          return p2p::makeTag(3, p2p::MessageKind::kPointToPoint, 5, tag, element);
        };
        std::vector<char> out(sent.bytes, 'x');
        std::vector<char> in(wanted.bytes + 8, '-');
        Tracked send;
        Tracked recv;
        const auto post = [&](bool isRecv) {
          if (isRecv) {
            b_->recv(a_of_b_, tagOf(wanted.element, 9), mask, in.data(), wanted.bytes, recv);
          } else {
            a_->send(b_of_a_, tagOf(sent.element, 9), out.data(), sent.bytes, send);
          }
        };
        post(recvFirst);
        progressUntil([] { return false; }, 1ms);
        post(!recvFirst);
        ASSERT_TRUE(progressUntil([&] { return send.done && recv.done; }));
        EXPECT_EQ(recv.status.code(), StatusCode::kMismatch) << recv.status.toString();
        EXPECT_EQ(recv.bytes, sent.bytes);
        EXPECT_EQ(p2p::elementOf(recv.tag), sent.element);
        EXPECT_EQ(p2p::sourceOf(recv.tag), 5);
        EXPECT_EQ(std::string(in.end() - 8, in.end()), "--------");
        if (sent.bytes >= GetParam().answersFrom) {
          EXPECT_EQ(send.status.code(), StatusCode::kMismatch) << send.status.toString();
        }
        if (!send.status) {
          EXPECT_EQ(send.status.code(), StatusCode::kMismatch) << send.status.toString();
          EXPECT_EQ(send.bytes, wanted.bytes);
          EXPECT_EQ(p2p::elementOf(send.tag), wanted.element);
        }

        std::vector<char> good(sent.bytes);
        Tracked send2;
        Tracked recv2;
        b_->recv(a_of_b_, tagOf(sent.element, 9), mask, good.data(), good.size(), recv2);
        a_->send(b_of_a_, tagOf(sent.element, 9), out.data(), out.size(), send2);
        ASSERT_TRUE(progressUntil([&] { return send2.done && recv2.done; }));
        EXPECT_TRUE(recv2.status) << recv2.status.toString();
        EXPECT_TRUE(send2.status) << send2.status.toString();
        EXPECT_EQ(good, out);
      }
    }
  }
}

TEST_P(TransportConformance, TheElementDoesNotDecideWhichMessageIsReceived) {
  for (const bool recvFirst : {false, true}) {
    for (const std::size_t bytes : {4ul, 100'000ul}) {
      SCOPED_TRACE(std::to_string(bytes) + (recvFirst ? " recv first" : " send first"));
      // The receives want the elements the other way round.
      const std::vector<char> out[2] = {std::vector<char>(bytes, 'a'), std::vector<char>(bytes, 'b')};
      std::vector<char> in[2] = {std::vector<char>(bytes), std::vector<char>(bytes)};
      Tracked sends[2];
      Tracked recvs[2];
      const auto tagOf = [](std::uint32_t element) {
        return p2p::makeTag(1, p2p::MessageKind::kPointToPoint, 0, 2, element);
      };
      const auto post = [&](bool isRecv) {
        for (const std::uint32_t i : {0u, 1u}) {
          if (isRecv) {
            b_->recv(a_of_b_, tagOf(2 - i), p2p::kAnyElementMask, in[i].data(), bytes, recvs[i]);
          } else {
            a_->send(b_of_a_, tagOf(1 + i), out[i].data(), bytes, sends[i]);
          }
        }
      };
      post(recvFirst);
      progressUntil([] { return false; }, 1ms);
      post(!recvFirst);
      ASSERT_TRUE(progressUntil([&] { return sends[0].done && sends[1].done && recvs[0].done && recvs[1].done; }));
      for (const std::uint32_t i : {0u, 1u}) {
        EXPECT_EQ(recvs[i].status.code(), StatusCode::kMismatch);
        EXPECT_EQ(p2p::elementOf(recvs[i].tag), 1 + i);
      }
    }
  }
}

TEST_P(TransportConformance, ACancelledReceiveCompletesAndItsMessageGoesToTheNext) {
  int in = 0;
  int in2 = 0;
  const int value = 7;
  Tracked recv;
  b_->recv(a_of_b_, 4, p2p::kExactMask, &in, sizeof in, recv);
  b_->cancel(recv);
  ASSERT_TRUE(progressUntil([&] { return recv.done; }));
  EXPECT_EQ(recv.status.code(), StatusCode::kAborted);
  Tracked send;
  Tracked recv2;
  a_->send(b_of_a_, 4, &value, sizeof value, send);
  b_->recv(a_of_b_, 4, p2p::kExactMask, &in2, sizeof in2, recv2);
  ASSERT_TRUE(progressUntil([&] { return send.done && recv2.done; }));
  EXPECT_EQ(in, 0);
  EXPECT_EQ(in2, 7);
}

TEST_P(TransportConformance, AnArmedTransportWakesUpForAMessageAndForASignal) {
  const auto readable = [](int fd, int ms) {
    pollfd descriptor{fd, POLLIN, 0};
    return poll(&descriptor, 1, ms) == 1;
  };
  // Wire-up first, so that the only event is the message.
  int in = 0;
  const int value = 1;
  Tracked send;
  Tracked recv;
  b_->recv(a_of_b_, 5, p2p::kExactMask, &in, sizeof in, recv);
  a_->send(b_of_a_, 5, &value, sizeof value, send);
  ASSERT_TRUE(progressUntil([&] { return send.done && recv.done; }));
  progressUntil([] { return false; }, 20ms);

  Tracked send2;
  Tracked recv2;
  b_->recv(a_of_b_, 6, p2p::kExactMask, &in, sizeof in, recv2);
  while (!b_->arm()) b_->progress();
  EXPECT_FALSE(readable(b_->eventFd(), 0));
  a_->send(b_of_a_, 6, &value, sizeof value, send2);
  for (int i = 0; i < 100; ++i) a_->progress();
  ASSERT_TRUE(readable(b_->eventFd(), 5000));
  ASSERT_TRUE(progressUntil([&] { return recv2.done; }));

  while (!b_->arm()) b_->progress();
  b_->signal();
  EXPECT_TRUE(readable(b_->eventFd(), 5000));
}

TEST_P(TransportConformance, RefusesAnAddressThatIsNone) {
  if (a_->name() == "ucx") GTEST_SKIP() << "a UCX address has no checksum: the rendezvous layer guards it";
  EXPECT_FALSE(a_->connect("nowhere"));
}

INSTANTIATE_TEST_SUITE_P(
    Every, TransportConformance,
    testing::Values(Kind{"LoopbackRendezvous", [] { return loopbackFactory(0); }, 1},
                    Kind{"LoopbackEager", [] { return loopbackFactory(8192); }, 8193},
                    Kind{"Shm", [] { return shmFactory({}); }, 8193},
                    Kind{"ShmSmallRing", [] { return shmFactory({.ringBytes = 64 << 10}); }, 8193},
                    Kind{"ShmNoSingleCopy", [] { return shmFactory({.singleCopy = false}); }, 8193},
                    Kind{"Routed", []() -> std::function<std::unique_ptr<Transport>()> { return makeRouted; }, 8193},
                    Kind{"Ucx", []() -> std::function<std::unique_ptr<Transport>()> { return makeUcx; }, SIZE_MAX}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace farandole::transport
