// A connection to a process that has died since it connected to this one.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <deque>
#include <string>

#include "backend/transport/ucx/ucx_transport.h"
#include "tests/backend/transport/conformance.h"
#include "tests/backend/transport/ucx/addresses.h"

namespace farandole::transport {
namespace {

using Clock = std::chrono::steady_clock;

bool progressUntilDone(Transport& transport, const Tracked& request) {
  for (const auto end = Clock::now() + std::chrono::seconds(5); !request.done && Clock::now() < end;) {
    (void)transport.progress();
  }
  return request.done;
}

// Connects to the process at the other end of `socket`, reads nothing of what that answers, and waits to be killed.
[[noreturn]] void connectAndStay(int socket) {
  ::alarm(60);
  auto transport = UcxTransport::create().value();
  tell(socket, transport->address());
  const PeerId peer = transport->connect(hear(socket)).value();
  const int word = 1;
  Tracked send;
  transport->send(peer, 7, &word, sizeof word, send);
  tell(socket, "connected");
  for (;;) ::pause();
}

// UCX connects back over the connection that the peer has made. That is reset, since the peer has left what came on it
// unread; UCX begins a new one, which is refused.
TEST(UcxTransport, TellsOfOneThatDiedBetweenItsConnectionAndOurs) {
  std::array<int, 2> pair{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair.data()), 0);
  const pid_t pid = ::fork();
  if (pid == 0) connectAndStay(pair[1]);
  ::close(pair[1]);
  auto transport = UcxTransport::create().value();
  const std::string address = hear(pair[0]);
  tell(pair[0], transport->address());
  EXPECT_EQ(hear(pair[0]), "connected");
  const auto answered = Clock::now() + std::chrono::milliseconds(100);
  while (Clock::now() < answered) (void)transport->progress();
  ::kill(pid, SIGKILL);
  ASSERT_EQ(::waitpid(pid, nullptr, 0), pid);
  ::close(pair[0]);

  int word = 0;
  Status told;
  transport->onPeerFailed([&](PeerId, const Status& status) { told = status; });
  const PeerId peer = transport->connect(address).value();
  std::deque<Tracked> sends(4);
  for (Tracked& send : sends) transport->send(peer, 8, &word, sizeof word, send);
  for (const Tracked& send : sends) {
    ASSERT_TRUE(progressUntilDone(*transport, send));
    EXPECT_EQ(send.status.code(), StatusCode::kPeerLeft) << send.status.toString();
  }
  EXPECT_EQ(told.code(), StatusCode::kPeerLeft) << told.toString();
}

}  // namespace
}  // namespace farandole::transport
