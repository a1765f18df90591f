// A peer that is killed, in the middle of what it does, over every transport.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <thread>

#include "backend/p2p/message_tag.h"
#include "tests/backend/transport/conformance.h"
#include "tests/random_seed.h"

namespace farandole::transport {
namespace {

using Clock = std::chrono::steady_clock;

struct Passing : Tracked {
  explicit Passing(std::size_t bytes, char fill = 0) : data(bytes, fill) {}
  std::vector<char> data;
};
using Messages = std::deque<Passing>;

// What the peer does with its transport, which `messages` outlive: until it is killed, or `goesOn` says no.
using Life = std::function<void(Transport&, PeerId, Messages& messages, const std::function<bool()>& goesOn)>;

constexpr std::size_t kLarge = 3'000'000;  // with its sender until a receive wants it
constexpr auto kBound = 5s;

// What this process holds of the system.
std::map<std::string, int> resources() {
  std::map<std::string, int> held;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    ++held["descriptor " + target.substr(0, target.find(":["))];
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.substr(line.find(' ') + 1, 4).ends_with('s')) ++held["map " + line.substr(line.rfind(' ') + 1)];
  }
  return held;
}

// What this process holds more than before.
std::string leftSince(const std::map<std::string, int>& before) {
  std::string text;
  for (const auto& [what, count] : resources()) {
    const auto known = before.find(what);
    const int more = count - (known != before.end() ? known->second : 0);
    if (more > 0) text += std::to_string(more) + " " + what + "; ";
  }
  return text;
}

void writeText(int fd, const std::string& text) {
  const auto size = static_cast<std::uint32_t>(text.size());
  ASSERT_EQ(::write(fd, &size, sizeof size), static_cast<ssize_t>(sizeof size));
  ASSERT_EQ(::write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

std::string readText(int fd) {
  std::uint32_t size = 0;
  EXPECT_EQ(::recv(fd, &size, sizeof size, MSG_WAITALL), static_cast<ssize_t>(sizeof size));
  std::string text(size, '\0');
  EXPECT_EQ(::recv(fd, text.data(), size, MSG_WAITALL), static_cast<ssize_t>(size));
  return text;
}

// A peer in a process of its own; of a transport that stays in one process, a thread whose end destroys the transport.
class Peer {
 public:
  Peer(const Kind& kind, const std::function<std::unique_ptr<Transport>()>& make, const Life& life) {
    std::array<int, 2> pair{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()), 0);
    socket_ = pair[0];
    if (kind.isInProcess) {
      thread_.emplace([this, make, life, theirs = pair[1]] {
        live(make, life, theirs, [this] { return !over_.load(); });
        ::close(theirs);
      });
      return;
    }
    pid_ = ::fork();
    if (pid_ != 0) {
      ::close(pair[1]);
      return;
    }
    ::close(pair[0]);
    ::alarm(60);
    live(make, life, pair[1], [] { return true; });
    ::_exit(1);
  }
  ~Peer() {
    kill();
    ::close(socket_);
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  std::string meet(const std::string& address) const {
    writeText(socket_, address);
    return readText(socket_);
  }
  // Returns when it is gone.
  void kill() {
    over_ = true;
    thread_.reset();
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    EXPECT_EQ(::waitpid(std::exchange(pid_, 0), nullptr, 0) > 0, true);
  }

 private:
  static void live(const std::function<std::unique_ptr<Transport>()>& make, const Life& life, int socket,
                   const std::function<bool()>& goesOn) {
    Messages messages;
    const std::unique_ptr<Transport> transport = make();
    const std::string other = readText(socket);
    writeText(socket, transport->address());
    if (Result<PeerId> peer = transport->connect(other)) life(*transport, *peer, messages, goesOn);
  }

  int socket_ = -1;
  pid_t pid_ = 0;
  std::atomic<bool> over_ = false;
  std::optional<std::jthread> thread_;
};

class TransportDeaths : public ::testing::TestWithParam<Kind> {
 protected:
  void begin(const Life& life) {
    auto make = GetParam().makeFactory();
    peer_.emplace(GetParam(), make, life);  // before there is a transport here that it would inherit
    transport_ = make();
    transport_->onPeerFailed([this](PeerId peer, const Status& status) { told_.emplace_back(peer, status); });
    const Result<PeerId> connected = transport_->connect(peer_->meet(transport_->address()));
    ASSERT_TRUE(connected) << connected.status().toString();
    id_ = *connected;
  }
  // As whoever is told so by others.
  void kill() {
    peer_->kill();
    killedAt_ = Clock::now();
    transport_->drop(id_, Status(StatusCode::kPeerFailed, "the test killed it"));
  }
  Passing& send(std::size_t bytes, std::uint64_t tag) {
    Passing& message = messages_.emplace_back(bytes, static_cast<char>('a' + tag % 26));
    transport_->send(id_, tag, message.data.data(), bytes, message);
    return message;
  }
  Passing& recv(std::size_t bytes, std::uint64_t tag, bool fromAny = false) {
    Passing& message = messages_.emplace_back(bytes);
    transport_->recv(fromAny ? kAnyPeer : id_, tag, p2p::kExactMask, message.data.data(), bytes, message);
    return message;
  }
  bool progressUntil(const std::function<bool()>& done, std::chrono::milliseconds limit = kBound) {
    const auto end = Clock::now() + limit;
    while (!done() && Clock::now() < end) transport_->progress();
    return done();
  }
  // That the peer was named, once, and that all that was begun with it ends.
  void expectTheEnd() {
    EXPECT_TRUE(progressUntil([&] { return !told_.empty(); })) << "nobody was told";
    for (Passing& message : messages_) {
      if (!message.done) transport_->cancel(message);
    }
    EXPECT_TRUE(progressUntil([&] { return std::ranges::all_of(messages_, &Passing::done); }))
        << std::ranges::count(messages_, false, &Passing::done) << " of " << messages_.size() << " are pending";
    EXPECT_LT(Clock::now() - killedAt_, kBound);
    ASSERT_EQ(told_.size(), 1u);
    EXPECT_EQ(told_[0].first, id_);
    expectDeath(told_[0].second);
    expectDeath(transport_->failure(id_));
    Passing& later = send(8, 99);
    EXPECT_TRUE(progressUntil([&] { return later.done; }));
    expectDeath(later.status);
    Passing& none = recv(8, 98);
    transport_->cancel(none);
    EXPECT_TRUE(progressUntil([&] { return none.done; }));
    EXPECT_FALSE(none.status);
    EXPECT_EQ(told_.size(), 1u);
  }
  static void expectDeath(const Status& status) {
    EXPECT_TRUE(status.code() == StatusCode::kPeerFailed || status.code() == StatusCode::kPeerLeft)
        << status.toString();
  }
  void end() {
    const auto start = Clock::now();
    transport_.reset();
    EXPECT_LT(Clock::now() - start, 2s);
    peer_.reset();
    messages_.clear();
    told_.clear();
  }
  // Twice: what a library makes once for all may stay.
  void leavesNothing(const std::function<void()>& life) {
    life();
    const auto before = resources();
    life();
    EXPECT_EQ(leftSince(before), "");
  }

  std::optional<Peer> peer_;
  std::unique_ptr<Transport> transport_;
  PeerId id_{};
  Messages messages_;
  std::vector<std::pair<PeerId, Status>> told_;
  Clock::time_point killedAt_;
};

void stay(Transport& transport, PeerId, Messages&, const std::function<bool()>& goesOn) {
  while (goesOn()) transport.progress();
}

TEST_P(TransportDeaths, WhatIsPendingWithItEndsAndNothingStays) {
  leavesNothing([&] {
    begin(stay);
    Passing& small = send(8, 1);
    Passing& large = send(kLarge, 2);
    Passing& wanted = recv(8, 3);
    Passing& largeWanted = recv(kLarge, 4);
    Passing& fromAny = recv(8, 5, true);
    progressUntil([] { return false; }, 50ms);
    EXPECT_FALSE(large.done || wanted.done || largeWanted.done || fromAny.done);
    kill();
    expectTheEnd();
    EXPECT_TRUE(small.done);
    expectDeath(large.status);
    EXPECT_FALSE(wanted.status || largeWanted.status || fromAny.status);
    end();
  });
}

TEST_P(TransportDeaths, WhatItSentBeforeIsReceivedFirst) {
  leavesNothing([&] {
    begin([](Transport& transport, PeerId peer, Messages& sent, const std::function<bool()>& goesOn) {
      for (const std::size_t bytes : {8ul, 1000ul, 4000ul, kLarge}) {
        Passing& message = sent.emplace_back(bytes, 'x');
        transport.send(peer, 7, message.data.data(), bytes, message);
      }
      stay(transport, peer, sent, goesOn);
    });
    progressUntil([] { return false; }, 200ms);
    kill();
    std::vector<Passing*> received;
    for (const std::size_t bytes : {8ul, 1000ul, 4000ul, kLarge}) received.push_back(&recv(bytes, 7));
    const auto isGone = [](const Passing* message) { return message->data.size() >= GetParam().answersFrom; };
    for (int i = 0; i < 3 && !isGone(received[i]); ++i) {
      EXPECT_TRUE(progressUntil([&] { return received[i]->done; }));
      EXPECT_TRUE(received[i]->status) << received[i]->status.toString();
      EXPECT_TRUE(std::ranges::all_of(received[i]->data, [](char byte) { return byte == 'x'; }));
    }
    expectTheEnd();
    EXPECT_FALSE(received[3]->status) << "of memory that is gone";
    end();
  });
}

// Of what it never received, also what its sender was too far ahead with.
TEST_P(TransportDeaths, WhatItNeverReceivedEndsWithIt) {
  leavesNothing([&] {
    begin(stay);
    for (int i = 0; i < 200; ++i) send(4000, 1);
    progressUntil([] { return false; }, 50ms);
    const bool isBounded = GetParam().unexpectedBytes > 0;
    EXPECT_FALSE(isBounded && std::ranges::all_of(messages_, &Passing::done));
    kill();
    expectTheEnd();
    end();
  });
}

// Both send and receive all the time.
void exchange(Transport& transport, PeerId peer, Messages& messages, const std::function<bool()>& goesOn) {
  std::mt19937 random(5);
  while (goesOn()) {
    messages.clear();
    for (std::uint64_t tag = 0; tag < 4; ++tag) {
      const std::size_t bytes = std::array{8ul, 9000ul, 300'000ul, 5'000'000ul}[random() % 4];
      Passing& out = messages.emplace_back(bytes, 'o');
      transport.send(peer, tag, out.data.data(), bytes, out);
      Passing& in = messages.emplace_back(bytes);
      transport.recv(peer, tag, p2p::kExactMask, in.data.data(), bytes, in);
    }
    while (!std::ranges::all_of(messages, &Passing::done) && goesOn()) transport.progress();
  }
}

TEST_P(TransportDeaths, AKillInFullFlowEndsWhatIsUnderWay) {
  std::mt19937_64 random(testing::someSeed());
  for (int life = 0; life < 6; ++life) {
    begin(exchange);
    const auto delay = std::chrono::microseconds(std::uniform_int_distribution<int>(500, 60'000)(random));
    SCOPED_TRACE("killed after " + std::to_string(delay.count()) + " us");
    std::mt19937 sizes(5);
    const auto end = Clock::now() + delay;
    while (Clock::now() < end) {
      for (std::uint64_t tag = 0; tag < 4; ++tag) {
        const std::size_t bytes = std::array{8ul, 9000ul, 300'000ul, 5'000'000ul}[sizes() % 4];
        send(bytes, tag);
        recv(bytes, tag);
      }
      const auto areDone = [&] { return std::ranges::all_of(messages_, &Passing::done); };
      while (!areDone() && Clock::now() < end) transport_->progress();
      if (!areDone()) break;
      for (const Passing& message : messages_) EXPECT_TRUE(message.status) << message.status.toString();
      messages_.clear();
    }
    kill();
    expectTheEnd();
    this->end();
  }
}

INSTANTIATE_TEST_SUITE_P(Every, TransportDeaths, ::testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace farandole::transport
