// A message that is not the one its receiver wants, over every transport.
#include <string>
#include <utility>
#include <vector>

#include "backend/p2p/message_tag.h"
#include "tests/backend/transport/conformance.h"

namespace farandole::transport {
namespace {

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
    for (const std::pair<Side, Side>& sides : cases) {
      const Side& sent = sides.first;
      const Side& wanted = sides.second;
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

}  // namespace
}  // namespace farandole::transport
