// Large messages between sides that are at hand or not, over every transport.
#include <algorithm>
#include <random>
#include <vector>

#include "backend/p2p/message_tag.h"
#include "tests/backend/transport/conformance.h"
#include "tests/random_seed.h"

namespace farandole::transport {
namespace {

// Who sends may be at hand, look now and then, or leave it to a loop.
TEST_P(TransportConformance, LargeMessagesComeWholeHoweverTheSidesTakeTurns) {
  std::mt19937_64 random(testing::someSeed());
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

}  // namespace
}  // namespace farandole::transport
