// Who is not of the group: the control plane neither answers nor believes them.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backend/net/control_address.h"
#include "backend/net/control_messages.h"
#include "backend/net/control_plane.h"
#include "backend/net/frame.h"
#include "tests/backend/net/control_cluster.h"

namespace farandole::net {
namespace {

// A client that speaks what it likes.
class Stranger {
 public:
  explicit Stranger(const std::string& address) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in target{};
    target.sin_family = AF_INET;
    target.sin_port = htons((*ControlAddress::decode(address)).port);
    target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&target), sizeof target) == 0;
    timeval limit{8, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }
  ~Stranger() { ::close(fd_); }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;
  bool connected() const { return connected_; }
  void say(const std::string& bytes) {
    EXPECT_EQ(::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
  }
  // All that is said before the other side closes; fails when it does not.
  std::string hear() {
    std::string heard;
    std::array<char, 256> buffer{};
    ssize_t bytes = 0;
    while ((bytes = ::recv(fd_, buffer.data(), buffer.size(), 0)) > 0) heard.append(buffer.data(), bytes);
    EXPECT_TRUE(bytes == 0 || errno == ECONNRESET) << "still open";
    return heard;
  }

 private:
  int fd_;
  bool connected_ = false;
};

TEST(ControlPlane, DropsStrangersAndTellsThemNothing) {
  ControlCluster cluster(2);
  cluster.joinAll();
  const std::string& address = cluster.plane(0).address();
  {
    Stranger scanner(address);
    ASSERT_TRUE(scanner.connected());
    scanner.say("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    EXPECT_EQ(scanner.hear(), "");
  }
  {
    Stranger silent(address);
    EXPECT_EQ(silent.hear(), "");
  }
  {
    Stranger greedy(address);
    greedy.say(std::string("\xff\xff\xff\x7f", 4) + "\x01\x01");
    EXPECT_EQ(greedy.hear(), "");
  }
  // Says hello as a process of the job may, and then speaks without a proof.
  const std::string hello = encodeFrame(FrameType::kHello, HelloMessage{77, 78}.encode());
  {
    Stranger pretender(address);
    pretender.say(hello +
                  encodeFrame(FrameType::kFacts, FactsMessage{"g", {{FactKind::kFailed, 1, 1, "lie"}}}.encode()[0]));
    EXPECT_EQ(pretender.hear().size(), hello.size());
  }
  std::vector<std::unique_ptr<Stranger>> crowd;
  crowd.reserve(400);
  for (int i = 0; i < 400; ++i) crowd.push_back(std::make_unique<Stranger>(address));
  ASSERT_TRUE(cluster.plane(1).abort("g", "after the strangers").isOk());
  EXPECT_TRUE(cluster.listener(0).waitForAbortBy(1));
  EXPECT_TRUE(cluster.listener(0).failed().empty());
  EXPECT_TRUE(cluster.listener(1).failed().empty());
}

TEST(ControlPlane, ACrowdOfStrangersKeepsNobodyOut) {
  ControlTimes times;
  times.stranger = 60s;
  ControlCluster cluster(2, times);
  const std::string hello = encodeFrame(FrameType::kHello, HelloMessage{77, 78}.encode());
  std::vector<std::unique_ptr<Stranger>> crowd;
  crowd.reserve(600);
  for (int i = 0; i < 600; ++i) {
    crowd.push_back(std::make_unique<Stranger>(cluster.plane(i % 2).address()));
    crowd.back()->say(hello);
  }
  std::this_thread::sleep_for(200ms);
  cluster.joinAll();
  ASSERT_TRUE(cluster.plane(1).abort("g", "beside the strangers").isOk());
  EXPECT_TRUE(cluster.listener(0).waitForAbortBy(1));
  // The first ones are closed, with an answer or before they had one.
  for (std::size_t plane = 0; plane < 2; ++plane) EXPECT_LE(crowd[plane]->hear().size(), hello.size());
}

TEST(ControlPlane, BelievesNobodyWithAnotherToken) {
  ControlTimes times;
  times.grace = 100ms;
  ControlCluster cluster(2, times);
  auto impostors = cluster.members();
  ASSERT_TRUE(cluster.plane(0).joinGroup("g", 0, cluster.members(), kTestToken, cluster.sharedListener(0)).isOk());
  ASSERT_TRUE(cluster.plane(1)
                  .joinGroup("g", 1, impostors, "another token of 32 bytes, wrong", cluster.sharedListener(1))
                  .isOk());
  ASSERT_TRUE(cluster.plane(1).abort("g", "lie").isOk());
  EXPECT_FALSE(cluster.listener(0).waitForAbortBy(1, 500ms));
}

}  // namespace
}  // namespace farandole::net
