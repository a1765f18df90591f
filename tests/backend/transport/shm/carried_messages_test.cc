// Messages that come along with their offer.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "backend/transport/shm/shm_transport.h"
#include "tests/backend/transport/conformance.h"

namespace farandole::transport {
namespace {

constexpr std::size_t kSmallest = (8 << 10) + 1;
constexpr std::size_t kMost = 64 << 10;

std::unique_ptr<Transport> make() {
  // Else a receiver reads what does not come along, and needs nothing of its sender either.
  return ShmTransport::create({.singleCopy = ShmOptions::SingleCopy::kOff}).value();
}

std::vector<std::byte> randomBytes(std::size_t size) {
  std::mt19937_64 random(size);
  std::vector<std::byte> data(size);
  std::ranges::generate(data, [&] { return static_cast<std::byte>(random()); });
  return data;
}

class CarriedMessages : public ::testing::Test {
 protected:
  bool progress(Transport& transport, const bool& done) {
    for (int i = 0; i < 1000 && !done; ++i) transport.progress();
    return done;
  }

  void finish(const Tracked& send) {
    const auto end = std::chrono::steady_clock::now() + 10s;
    while (!send.done && std::chrono::steady_clock::now() < end) {
      a_->progress();
      b_->progress();
    }
    ASSERT_TRUE(send.done);
  }

  std::unique_ptr<Transport> a_ = make();
  std::unique_ptr<Transport> b_ = make();
  PeerId b_of_a_ = a_->connect(b_->address()).value();
  PeerId a_of_b_ = b_->connect(a_->address()).value();
};

TEST_F(CarriedMessages, AReceiveThatWaitsNeedsNothingMoreOfTheSender) {
  for (const std::size_t bytes : {kSmallest, std::size_t{20'001}, kMost, kMost + 1}) {
    SCOPED_TRACE(bytes);
    const std::vector<std::byte> out = randomBytes(bytes);
    std::vector<std::byte> in(bytes);
    Tracked send;
    Tracked recv;
    b_->recv(a_of_b_, 1, ~std::uint64_t{0}, in.data(), bytes, recv);
    a_->send(b_of_a_, 1, out.data(), bytes, send);
    EXPECT_EQ(progress(*b_, recv.done), bytes <= kMost);
    EXPECT_FALSE(send.done);
    finish(send);
    EXPECT_TRUE(send.status) << send.status.toString();
    EXPECT_TRUE(recv.done);
    EXPECT_EQ(in, out);
  }
}

TEST_F(CarriedMessages, WhatNoReceiveWaitsForIsNotKept) {
  std::vector<std::byte> out = randomBytes(kMost);
  std::vector<std::byte> in(kMost);
  Tracked send;
  Tracked recv;
  a_->send(b_of_a_, 1, out.data(), out.size(), send);
  EXPECT_FALSE(progress(*b_, recv.done));
  std::ranges::reverse(out);  // which no program may do
  b_->recv(a_of_b_, 1, ~std::uint64_t{0}, in.data(), in.size(), recv);
  finish(send);
  EXPECT_TRUE(recv.status) << recv.status.toString();
  EXPECT_EQ(in, out);
}

TEST_F(CarriedMessages, WhatHasNoRoomInTheRingArrivesInOrder) {
  constexpr std::size_t kCount = 20;
  std::vector<std::vector<std::byte>> out(kCount);
  std::vector<std::vector<std::byte>> in(kCount);
  std::vector<Tracked> sends(kCount);
  std::vector<Tracked> recvs(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    out[i] = randomBytes(i % 3 == 0 ? 100 + i : kMost - i);
    in[i].resize(out[i].size());
    a_->send(b_of_a_, 1, out[i].data(), out[i].size(), sends[i]);
    if (i % 2 == 0) b_->recv(a_of_b_, 1, ~std::uint64_t{0}, in[i / 2].data(), in[i / 2].size(), recvs[i / 2]);
  }
  for (std::size_t i = kCount / 2; i < kCount; ++i) {
    b_->recv(a_of_b_, 1, ~std::uint64_t{0}, in[i].data(), in[i].size(), recvs[i]);
  }
  for (const Tracked& send : sends) finish(send);
  for (std::size_t i = 0; i < kCount; ++i) {
    EXPECT_TRUE(sends[i].status) << i << ": " << sends[i].status.toString();
    EXPECT_TRUE(recvs[i].status) << i << ": " << recvs[i].status.toString();
    EXPECT_EQ(in[i], out[i]) << i;
  }
}

}  // namespace
}  // namespace farandole::transport
