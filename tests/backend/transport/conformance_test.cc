// What every transport must do, run over each of them.
#include "tests/backend/transport/conformance.h"

#include <poll.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "backend/p2p/message_tag.h"

namespace farandole::transport {
namespace {

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

// Others may close what leads to who leaves, and end, before its process does.
TEST_P(TransportConformance, WhoLeavesTakesNoPeerForDead) {
  std::vector<std::string> deaths;
  const auto note = [&](PeerId, const Status& status) {
    if (status.code() == StatusCode::kPeerFailed) deaths.push_back(status.toString());
  };
  a_->onPeerFailed(note);
  b_->onPeerFailed(note);
  Tracked received;
  char got = 0;
  a_->recv(b_of_a_, 7, p2p::kExactMask, &got, 1, received);
  Tracked sent;
  const char byte = 'x';
  b_->send(a_of_b_, 7, &byte, 1, sent);
  ASSERT_TRUE(progressUntil([&] { return received.done && sent.done; }));
  a_->leave();
  EXPECT_FALSE(progressUntil([&] { return !deaths.empty(); }, 100ms)) << deaths.front();
  b_.reset();
  const auto end = std::chrono::steady_clock::now() + 100ms;
  while (std::chrono::steady_clock::now() < end) a_->progress();
  EXPECT_TRUE(deaths.empty()) << deaths.front();
}

// More words of it than there is room for at once, to a sender that has no turn meanwhile.
TEST_P(TransportConformance, WhatWasReceivedIsToldByWhoLeavesThen) {
  constexpr std::size_t kBytes = 64 << 10, kMessages = 600;
  const std::vector<char> sent(kBytes, 'x');
  std::vector<char> received(kBytes);
  std::deque<Tracked> sends(kMessages), receives(kMessages);
  const auto areDone = [](const std::deque<Tracked>& all) {
    return std::ranges::all_of(all, [](const Tracked& one) { return one.done; });
  };
  for (std::size_t i = 0; i < kMessages; ++i) a_->send(b_of_a_, i, sent.data(), kBytes, sends[i]);
  progressUntil([] { return false; }, 200ms);
  for (std::size_t i = 0; i < kMessages; ++i) {
    b_->recv(a_of_b_, i, p2p::kExactMask, received.data(), kBytes, receives[i]);
  }
  const auto end = std::chrono::steady_clock::now() + 200ms;
  while (!areDone(receives) && std::chrono::steady_clock::now() < end) b_->progress();
  ASSERT_TRUE(progressUntil([&] { return areDone(receives); }));  // where it takes both
  std::thread leaving([&] { b_.reset(); });
  const auto limit = std::chrono::steady_clock::now() + 10s;
  while (!areDone(sends) && std::chrono::steady_clock::now() < limit) a_->progress();
  leaving.join();
  for (const Tracked& one : sends) {
    ASSERT_TRUE(one.done);
    ASSERT_TRUE(one.status) << one.status.toString();
  }
}

TEST_P(TransportConformance, RefusesAnAddressThatIsNone) {
  if (a_->name() == "ucx") GTEST_SKIP() << "a UCX address has no checksum: the rendezvous layer guards it";
  EXPECT_FALSE(a_->connect("nowhere"));
}

INSTANTIATE_TEST_SUITE_P(Every, TransportConformance, testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace farandole::transport
