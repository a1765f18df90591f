// What UCX uses between two processes of a host.
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "backend/transport/ucx/ucx_transport.h"

namespace farandole::transport {
namespace {

using Clock = std::chrono::steady_clock;

struct Flagged : Request {
  Flagged() {
    onDone = [](Request& request) { static_cast<Flagged&>(request).isDone = true; };
  }
  bool isDone = false;
};

// Whoever is killed while it writes into one of UCX's shared queues stops that queue for all others.
TEST(UcxTransport, HasNoQueueInSharedMemoryThatAllWriteIntoUnlessAskedTo) {
  auto sender = UcxTransport::create().value();
  auto receiver = UcxTransport::create().value();
  const PeerId toReceiver = sender->connect(receiver->address()).value();
  const PeerId toSender = receiver->connect(sender->address()).value();
  int sent = 1;
  int received = 0;
  Flagged send;
  Flagged recv;
  receiver->recv(toSender, 7, ~std::uint64_t{0}, &received, sizeof received, recv);
  sender->send(toReceiver, 7, &sent, sizeof sent, send);
  for (const auto end = Clock::now() + std::chrono::seconds(20); !(send.isDone && recv.isDone);) {
    ASSERT_LT(Clock::now(), end);
    (void)sender->progress();
    (void)receiver->progress();
  }
  EXPECT_EQ(received, 1);
  const std::string lanes = sender->describe(toReceiver);
  EXPECT_NE(lanes.find("tcp"), std::string::npos) << lanes;
  for (const char* queue : {"posix", "sysv", "xpmem"}) EXPECT_EQ(lanes.find(queue), std::string::npos) << lanes;
}

}  // namespace
}  // namespace farandole::transport
