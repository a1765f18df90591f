// A sender that is ahead of its receiver, over every transport with a small bound for that.
#include <algorithm>
#include <deque>
#include <random>
#include <vector>

#include "backend/p2p/message_tag.h"
#include "tests/backend/transport/conformance.h"
#include "tests/random_seed.h"

namespace farandole::transport {
namespace {

constexpr std::size_t kBytes = 4000;

struct Sent : Tracked {
  std::vector<unsigned char> data;
};
struct Received : Tracked {
  std::vector<unsigned char> data;
};

std::vector<unsigned char> contentOf(std::size_t bytes, std::size_t number) {
  std::vector<unsigned char> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(number * 31 + i);
  return data;
}

class UnexpectedMessages : public TransportConformance {
 protected:
  void SetUp() override {
    TransportConformance::SetUp();
    numAhead_ = static_cast<int>(4 * GetParam().unexpectedBytes / kBytes);
  }

  Sent& send(std::uint64_t tag, std::size_t bytes, std::size_t number, bool fromB = false) {
    Sent& sent = sends_.emplace_back();
    sent.data = contentOf(bytes, number);
    Transport& from = fromB ? *b_ : *a_;
    from.send(fromB ? a_of_b_ : b_of_a_, tag, sent.data.data(), bytes, sent);
    return sent;
  }
  // Four times what the receiver keeps, until nothing goes on.
  void sendAhead(std::uint64_t tag) {
    for (int i = 0; i < numAhead_; ++i) {
      send(tag, kBytes, static_cast<std::size_t>(i));
      if (i % 16 == 0) b_->progress();
    }
    settle();
  }
  void settle() {
    std::ptrdiff_t before = -1;
    while (before != numDone()) {
      before = numDone();
      progressUntil([] { return false; }, 50ms);
    }
  }
  std::ptrdiff_t numDone() const {
    return std::ranges::count_if(sends_, [](const Sent& sent) { return sent.done; });
  }
  void expectReceived(std::uint64_t tag, std::size_t bytes, std::size_t number, bool byA = false) {
    Received received;
    received.data.resize(bytes);
    Transport& to = byA ? *a_ : *b_;
    to.recv(byA ? b_of_a_ : a_of_b_, tag, p2p::kAnyElementMask, received.data.data(), bytes, received);
    ASSERT_TRUE(progressUntil([&] { return received.done; }, 5s)) << "number " << number;
    EXPECT_TRUE(received.status) << received.status.toString();
    EXPECT_TRUE(received.data == contentOf(bytes, number)) << "number " << number;
  }
  void expectAheadReceived(std::uint64_t tag) {
    for (int i = 0; i < numAhead_ && !HasFatalFailure(); ++i) expectReceived(tag, kBytes, static_cast<std::size_t>(i));
  }
  void expectAllSent() {
    EXPECT_TRUE(progressUntil([&] { return numDone() == std::ssize(sends_); }, 5s));
    for (const Sent& sent : sends_) EXPECT_TRUE(sent.status) << sent.status.toString();
  }

  // Though nobody receives them; with an error, where it says that the group is over.
  void expectAllEnd() {
    const bool haveEnded = progressUntil(
        [&] {
          a_->look(std::chrono::steady_clock::now());
          b_->look(std::chrono::steady_clock::now());
          return numDone() == std::ssize(sends_);
        },
        5s);
    EXPECT_TRUE(haveEnded) << numDone() << " of " << sends_.size();
    for (const Sent& sent : sends_) {
      EXPECT_TRUE(sent.status || sent.status.code() == StatusCode::kPeerLeft) << sent.status.toString();
    }
  }
  void closeOfB(std::uint32_t group) {
    const std::string address = a_->address();
    b_->closeGroup(group, {address});
  }
  // Of the group; so that the sender is ahead of nobody.
  void expectNothingKept(std::uint32_t group) {
    Received received;
    EXPECT_FALSE(b_->recvIfThere(p2p::groupTag(group), p2p::kGroupMask, nullptr, 0, received));
    progressUntil([] { return false; }, 50ms);  // receipts
    const std::uint64_t others = tagOf(99, group);
    Sent& small = send(others, 8, group);
    EXPECT_TRUE(progressUntil([&] { return small.done; }, 2s));
    expectReceived(others, 8, group);
  }

  static std::uint64_t tagOf(std::uint32_t group, std::uint32_t tag) {
    return p2p::makeTag(group, p2p::MessageKind::kPointToPoint, 0, tag);
  }

  int numAhead_ = 0;
  std::deque<Sent> sends_;
};

TEST_P(UnexpectedMessages, ASenderThatIsAheadWaitsForItsReceiver) {
  sendAhead(tagOf(1, 1));
  const auto done = static_cast<std::size_t>(numDone());
  // What is on its way adds to what is kept: a ring of 128K.
  EXPECT_LE(done * kBytes, GetParam().unexpectedBytes + (136 << 10));
  EXPECT_GE(done * kBytes, GetParam().unexpectedBytes / 2);
  expectAheadReceived(tagOf(1, 1));
  expectAllSent();
}

TEST_P(UnexpectedMessages, WhatIsBehindUnwantedMessagesIsReceived) {
  sendAhead(tagOf(1, 1));
  std::size_t number = 1000;
  for (const std::size_t bytes : {8ul, 0ul, 5000ul, 100'000ul, 3'000'000ul}) {
    const std::uint64_t others = tagOf(2, 7);
    Sent& sent = send(others, bytes, ++number);
    expectReceived(others, bytes, number);
    EXPECT_TRUE(progressUntil([&] { return sent.done; }, 5s)) << bytes << " bytes";
    // And the other way, with answers that pass by what is not wanted.
    Sent& back = send(others, bytes, ++number, true);
    expectReceived(others, bytes, number, true);
    EXPECT_TRUE(progressUntil([&] { return back.done; }, 5s)) << bytes << " bytes";
  }
  expectAheadReceived(tagOf(1, 1));
  expectAllSent();
}

TEST_P(UnexpectedMessages, OneThatHasBeenWaitedForIsAheadAgain) {
  for (std::uint32_t round = 0; round < 3; ++round) {
    sendAhead(tagOf(1, round));
    expectAheadReceived(tagOf(1, round));
    expectAllSent();
    progressUntil([] { return false; }, 20ms);
    Sent& small = send(tagOf(1, 9), 8, round);
    EXPECT_TRUE(progressUntil([&] { return small.done; }, 2s)) << "in round " << round;
    expectReceived(tagOf(1, 9), 8, round);
  }
}

TEST_P(UnexpectedMessages, ManyOfNoBytesAreBoundedToo) {
  numAhead_ = static_cast<int>(GetParam().unexpectedBytes / 64);
  for (int i = 0; i < numAhead_; ++i) {
    send(tagOf(1, 1), 0, 0);
    if (i % 64 == 0) b_->progress();
  }
  settle();
  EXPECT_LT(numDone(), numAhead_);
  for (int i = 0; i < numAhead_ && !HasFatalFailure(); ++i) expectReceived(tagOf(1, 1), 0, 0);
  expectAllSent();
}

// Over UCX it cannot be called off, and is received.
TEST_P(UnexpectedMessages, OneThatIsHeldBackCanBeCancelled) {
  sendAhead(tagOf(1, 1));
  Sent& last = sends_.back();
  ASSERT_FALSE(last.done);
  a_->cancel(last);
  progressUntil([&] { return last.done; }, 200ms);
  const bool isCancelled = last.done;
  if (isCancelled) {
    EXPECT_EQ(last.status.code(), StatusCode::kAborted);
    sends_.pop_back();
    --numAhead_;
  }
  EXPECT_TRUE(isCancelled || GetParam().name.starts_with("Ucx"));
  expectAheadReceived(tagOf(1, 1));
  expectAllSent();
}

TEST_P(UnexpectedMessages, AnySourceAndWhatIsThereAreTakenFromThem) {
  sendAhead(tagOf(1, 1));
  for (int i = 0; i < numAhead_; ++i) {
    Received received;
    received.data.resize(kBytes);
    if (i % 2 == 0) {
      b_->recv(kAnyPeer, tagOf(1, 1), p2p::kAnySourceMask, received.data.data(), kBytes, received);
    } else {
      bool isThere = false;
      ASSERT_TRUE(progressUntil([&] {
        isThere = isThere || b_->recvIfThere(tagOf(1, 1), p2p::kAnySourceMask, received.data.data(), kBytes, received);
        return isThere;
      }));
    }
    ASSERT_TRUE(progressUntil([&] { return received.done; })) << "number " << i;
    b_->noteReceived(a_of_b_, kBytes);
    EXPECT_TRUE(received.data == contentOf(kBytes, static_cast<std::size_t>(i))) << "number " << i;
  }
  expectAllSent();
}

TEST_P(UnexpectedMessages, OnesToItselfAreBoundedToo) {
  Result<PeerId> self = a_->connect(a_->address());
  ASSERT_TRUE(self);
  for (int i = 0; i < numAhead_; ++i) {
    Sent& sent = sends_.emplace_back();
    sent.data = contentOf(kBytes, static_cast<std::size_t>(i));
    a_->send(*self, tagOf(1, 1), sent.data.data(), kBytes, sent);
  }
  settle();
  EXPECT_LT(numDone(), numAhead_);
  for (int i = 0; i < numAhead_; ++i) {
    Received received;
    received.data.resize(kBytes);
    a_->recv(*self, tagOf(1, 1), p2p::kAnyElementMask, received.data.data(), kBytes, received);
    ASSERT_TRUE(progressUntil([&] { return received.done; })) << "number " << i;
    EXPECT_TRUE(received.data == contentOf(kBytes, static_cast<std::size_t>(i))) << "number " << i;
  }
  expectAllSent();
}

// Both ways, tags in any order, some messages larger than what is ever kept.
TEST_P(UnexpectedMessages, NothingIsLostOrOutOfOrderHoweverFarOneIsAhead) {
  std::mt19937_64 random(testing::someSeed());
  const auto upTo = [&](std::size_t last) { return std::uniform_int_distribution<std::size_t>(0, last)(random); };
  struct Passing {
    bool fromB;
    std::uint64_t tag;
    std::vector<unsigned char> out;
    std::vector<unsigned char> in;
    Tracked send;
    Tracked recv;
  };
  std::vector<Passing> messages(600);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    Passing& m = messages[i];
    m.fromB = upTo(2) == 0;
    m.tag = tagOf(static_cast<std::uint32_t>(upTo(2)), static_cast<std::uint32_t>(upTo(3)));
    m.out = contentOf(upTo(9) == 0 ? upTo(200'000) : upTo(8192), i);
    m.in.resize(m.out.size());
  }
  std::vector<std::size_t> order(messages.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  // Any order of tags, and within one that of the sender.
  std::vector<std::uint64_t> rank(1 << 12);
  for (auto& one : rank) one = random();
  const auto keyOf = [&](std::size_t i) {
    const Passing& m = messages[i];
    return rank[((m.tag ^ m.tag >> 53) * 2 + (m.fromB ? 1 : 0)) % rank.size()];
  };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) { return keyOf(x) < keyOf(y); });
  std::size_t numSent = 0;
  std::size_t numPosted = 0;
  const auto isDone = [](const Passing& m) { return m.send.done && m.recv.done; };
  const auto end = std::chrono::steady_clock::now() + 20s;
  const std::size_t lead = upTo(messages.size());
  while (!std::ranges::all_of(messages, isDone) && std::chrono::steady_clock::now() < end) {
    if (numSent < messages.size()) {
      Passing& m = messages[numSent++];
      (m.fromB ? *b_ : *a_).send(m.fromB ? a_of_b_ : b_of_a_, m.tag, m.out.data(), m.out.size(), m.send);
    }
    if (numPosted < messages.size() && (numSent >= lead || numSent == messages.size())) {
      Passing& m = messages[order[numPosted++]];
      (m.fromB ? *a_ : *b_)
          .recv(m.fromB ? b_of_a_ : a_of_b_, m.tag, p2p::kAnyElementMask, m.in.data(), m.in.size(), m.recv);
    }
    if (upTo(3) == 0) a_->progress();
    if (upTo(3) == 0) b_->progress();
  }
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Passing& m = messages[i];
    ASSERT_TRUE(isDone(m)) << "number " << i << ", " << m.out.size() << " bytes";
    EXPECT_TRUE(m.send.status) << m.send.status.toString();
    EXPECT_TRUE(m.recv.status) << m.recv.status.toString();
    EXPECT_TRUE(m.in == m.out) << "number " << i << ", " << m.out.size() << " bytes";
  }
}

// As often as it takes to use the bound up, were they not counted out.
TEST_P(UnexpectedMessages, OnesOfAGroupThatIsOverAreDropped) {
  for (std::uint32_t group = 1; group <= 3; ++group) {
    sendAhead(tagOf(group, 1));
    closeOfB(group);
    expectAllEnd();
    expectNothingKept(group);
  }
}

TEST_P(UnexpectedMessages, OnesThatComeForAGroupThatIsOverAreDropped) {
  for (std::uint32_t group = 1; group <= 3; ++group) {
    closeOfB(group);
    sendAhead(tagOf(group, 1));
    send(tagOf(group, 2), 100'000, 1);
    expectAllEnd();
    expectNothingKept(group);
  }
}

// Its sender is ahead of nobody, however many groups have ended since.
TEST_P(UnexpectedMessages, OnesThatComeForAGroupThatWasOverLongAgoAreDropped) {
  constexpr std::uint32_t kLongAgo = 3;
  for (std::uint32_t group = 1; group <= kLongAgo; ++group) closeOfB(group);
  for (std::uint32_t group = 1000; group < p2p::kMaxGroups; ++group) closeOfB(group);
  send(tagOf(98, 1), 8, 0);  // what has been there longest is wanted yet
  for (std::uint32_t group = 1; group <= kLongAgo; ++group) {
    sendAhead(tagOf(group, 1));
    expectAllEnd();
    expectNothingKept(group);
  }
}

TEST_P(UnexpectedMessages, OnesThatAreDroppedCountForASenderToWhomNobodyConnected) {
  auto make = GetParam().makeFactory();
  a_ = make();
  b_ = make();
  const Result<PeerId> peer = a_->connect(b_->address());
  ASSERT_TRUE(peer);
  b_of_a_ = *peer;
  for (std::uint32_t group = 1; group <= 3; ++group) {
    sendAhead(tagOf(group, 1));
    closeOfB(group);
    expectAllEnd();
  }
  const Sent& small = send(tagOf(99, 1), 8, 1);
  EXPECT_TRUE(progressUntil([&] { return small.done; }, 2s));
  const Result<PeerId> back = b_->connect(a_->address());
  ASSERT_TRUE(back);
  a_of_b_ = *back;
  expectReceived(tagOf(99, 1), 8, 1);
  send(tagOf(99, 1), 8, 2, true);
  expectReceived(tagOf(99, 1), 8, 2, true);
}

TEST_P(UnexpectedMessages, ANumberThatIsOpenedAgainBeginsWithoutMessages) {
  sendAhead(tagOf(1, 1));
  b_->openGroup(1);
  closeOfB(1);
  sendAhead(tagOf(1, 1));
  b_->openGroup(1);
  expectAllEnd();
  for (const std::size_t bytes : {8ul, 8000ul, 100'000ul}) {
    Sent& sent = send(tagOf(1, 1), bytes, bytes);
    expectReceived(tagOf(1, 1), bytes, bytes);
    EXPECT_TRUE(progressUntil([&] { return sent.done; }, 5s)) << bytes << " bytes";
    EXPECT_TRUE(sent.status) << sent.status.toString();
  }
}

TEST_P(UnexpectedMessages, OnesToItselfOfAGroupThatIsOverAreDropped) {
  const Result<PeerId> self = a_->connect(a_->address());
  ASSERT_TRUE(self);
  for (const std::size_t bytes : std::vector<std::size_t>(numAhead_, kBytes)) {
    Sent& sent = sends_.emplace_back();
    sent.data = contentOf(bytes, 0);
    a_->send(*self, tagOf(1, 1), sent.data.data(), bytes, sent);
  }
  const std::string own = a_->address();
  a_->closeGroup(1, {own});
  expectAllEnd();
  Sent& sent = sends_.emplace_back();
  sent.data = contentOf(8, 0);
  a_->send(*self, tagOf(2, 1), sent.data.data(), 8, sent);
  EXPECT_TRUE(progressUntil([&] { return sent.done; }, 2s));
}

std::vector<Kind> boundedKinds() {
  std::vector<Kind> bounded = kinds();
  std::erase_if(bounded, [](const Kind& kind) { return kind.unexpectedBytes == 0; });
  return bounded;
}

INSTANTIATE_TEST_SUITE_P(Bounded, UnexpectedMessages, ::testing::ValuesIn(boundedKinds()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace farandole::transport
