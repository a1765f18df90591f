// Receives that are cancelled when a part of their message has come.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/p2p/message_tag.h"
#include "backend/transport/ucx/ucx_transport.h"
#include "tests/backend/transport/conformance.h"
#include "tests/backend/transport/ucx/addresses.h"

namespace farandole::transport {
namespace {

using Clock = std::chrono::steady_clock;

// More than the system holds of a connection.
constexpr std::size_t kBytes = 23'000'000;
constexpr std::uint64_t kTag = 7;

[[noreturn]] void sendUntilKilled(int socket) {
  ::alarm(60);
  auto transport = UcxTransport::create().value();
  tell(socket, transport->address());
  const PeerId peer = transport->connect(hear(socket)).value();
  const std::vector<char> data(kBytes, 'x');
  Tracked send;
  transport->send(peer, kTag, data.data(), data.size(), send);
  for (;;) (void)transport->progress();
}

struct Receive : Tracked {
  Receive() {
    keep = [](Request& request) -> std::shared_ptr<void> { return static_cast<Receive&>(request).buffer; };
  }
  std::shared_ptr<std::vector<char>> buffer = std::make_shared<std::vector<char>>(kBytes);
};

class UcxCancelledReceives : public ::testing::TestWithParam<bool> {
 protected:
  // When the first part is there, and the last one still with its sender.
  void begin() {
    ::setenv("UCX_RNDV_THRESH", "inf", 1);  // in parts, as over slower networks
    std::array<int, 2> pair{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair.data()), 0);
    pid_ = ::fork();
    if (pid_ == 0) sendUntilKilled(pair[1]);
    ::close(pair[1]);
    transport_ = UcxTransport::create().value();
    const std::string address = hear(pair[0]);
    peer_ = transport_->connect(address).value();
    receive_.emplace();
    transport_->recv(GetParam() ? kAnyPeer : peer_, kTag, p2p::kExactMask, receive_->buffer->data(), kBytes, *receive_);
    tell(pair[0], transport_->address());
    ::close(pair[0]);
    ASSERT_TRUE(progressUntil([&] { return receive_->buffer->front() == 'x'; }));
    ASSERT_FALSE(receive_->done);
  }
  void TearDown() override {
    kill();
    ::unsetenv("UCX_RNDV_THRESH");
  }
  void kill() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    EXPECT_EQ(::waitpid(std::exchange(pid_, 0), nullptr, 0) > 0, true);
  }
  bool progressUntil(const std::function<bool()>& done, std::chrono::milliseconds limit = 5s) {
    for (const auto end = Clock::now() + limit; !done() && Clock::now() < end;) (void)transport_->progress();
    return done();
  }

  pid_t pid_ = 0;
  std::unique_ptr<Transport> transport_;
  PeerId peer_{};
  std::optional<Receive> receive_;
};

// A sender that cannot be reached for a while does not know that it is given up.
TEST_P(UcxCancelledReceives, EndOnceTheSenderIsGivenUpAndTheirBufferIsHeldForWhatStillComes) {
  begin();
  const std::weak_ptr<std::vector<char>> buffer = receive_->buffer;
  ::kill(pid_, SIGSTOP);
  transport_->cancel(*receive_);
  transport_->look(Clock::now());
  EXPECT_FALSE(receive_->done) << "nobody is given up yet";
  transport_->drop(peer_, Status(StatusCode::kPeerFailed, "the test stopped it"));
  transport_->look(Clock::now());
  ASSERT_TRUE(receive_->done);
  EXPECT_EQ(receive_->status.code(), StatusCode::kAborted) << receive_->status.toString();
  receive_.reset();
  ::kill(pid_, SIGCONT);
  // All of it, over TCP (1.22).
  progressUntil([&] { return buffer.expired() || buffer.lock()->back() == 'x'; }, 1s);
  EXPECT_FALSE(buffer.expired());
  transport_.reset();
  EXPECT_TRUE(buffer.expired());
}

TEST_P(UcxCancelledReceives, WaitForTheRestWhileTheSenderLives) {
  begin();
  transport_->cancel(*receive_);
  transport_->look(Clock::now());
  EXPECT_FALSE(receive_->done);
  EXPECT_TRUE(progressUntil([&] { return receive_->done; }));
  EXPECT_TRUE(receive_->status) << receive_->status.toString();
  EXPECT_EQ(std::ranges::count(*receive_->buffer, 'x'), static_cast<std::ptrdiff_t>(kBytes));
  EXPECT_EQ(receive_->buffer.use_count(), 1);
}

TEST_P(UcxCancelledReceives, StayWhereTheirBufferIsNotKnown) {
  begin();
  receive_->keep = [](Request&) -> std::shared_ptr<void> { return nullptr; };
  kill();
  transport_->cancel(*receive_);
  transport_->drop(peer_, Status(StatusCode::kPeerFailed, "the test killed it"));
  transport_->look(Clock::now());
  EXPECT_FALSE(receive_->done);
  receive_->keep = Receive().keep;  // later it is
  transport_->look(Clock::now());
  EXPECT_TRUE(receive_->done);
  transport_.reset();
}

INSTANTIATE_TEST_SUITE_P(From, UcxCancelledReceives, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "AnyPeer" : "OnePeer"; });

}  // namespace
}  // namespace farandole::transport
