// Ranks that leave at any moment, with messages of every kind under way.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backend/transport/ucx/ucx_transport.h"

namespace farandole::transport {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 3;
constexpr std::array<std::size_t, 7> kSizes = {0, 8, 1000, 8192, 70'000, 300'000, 1'500'000};

struct Message {
  int source;
  int target;
  std::size_t sent;
  std::size_t wanted;  // of another size as often as not
  bool isPosted;
  bool isCancelled;
};

std::vector<Message> randomMessages(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Message> messages(random() % 12);
  for (Message& message : messages) {
    message.source = static_cast<int>(random() % kRanks);
    message.target = static_cast<int>((message.source + 1 + random() % (kRanks - 1)) % kRanks);
    message.sent = kSizes[random() % kSizes.size()];
    message.wanted = random() % 2 == 0 ? message.sent : kSizes[random() % kSizes.size()];
    message.isPosted = random() % 8 != 0;
    message.isCancelled = random() % 8 == 0;
  }
  return messages;
}

struct Meeting {
  std::barrier<> all{kRanks};
  std::array<std::string, kRanks> addresses;
  std::atomic<int> unfinished = 0;
};

struct Counted : Request {
  explicit Counted(int& open) : open(open) {
    ++open;
    onDone = [](Request& request) { --static_cast<Counted&>(request).open; };
  }
  int& open;
};

void takePart(int rank, const std::vector<Message>& messages, unsigned seed, Meeting& meeting) {
  std::mt19937 random(seed);
  auto transport = std::move(UcxTransport::create()).value();
  meeting.addresses[rank] = transport->address();
  meeting.all.arrive_and_wait();
  std::vector<PeerId> peers(kRanks);
  for (int other = 0; other < kRanks; ++other) {
    if (other != rank) peers[other] = transport->connect(meeting.addresses[other]).value();
  }
  int open = 0;
  std::deque<Counted> requests;
  std::deque<std::vector<char>> buffers;
  for (std::size_t tag = 0; tag < messages.size(); ++tag) {
    const Message& message = messages[tag];
    if (message.source == rank) {
      std::vector<char>& buffer = buffers.emplace_back(message.sent);
      transport->send(peers[message.target], tag, buffer.data(), buffer.size(), requests.emplace_back(open));
    } else if (message.target == rank && message.isPosted) {
      std::vector<char>& buffer = buffers.emplace_back(message.wanted);
      Counted& request = requests.emplace_back(open);
      transport->recv(peers[message.source], tag, ~std::uint64_t{0}, buffer.data(), buffer.size(), request);
      if (message.isCancelled) transport->cancel(request);
    }
    for (auto times = random() % 5; times > 0; --times) transport->progress();
  }
  const auto end = Clock::now() + std::chrono::milliseconds(random() % 20);
  while (open > 0 && Clock::now() < end) transport->progress();
  if (open > 0) ++meeting.unfinished;

  transport->onPeerFailed([](PeerId, const Status&) { ADD_FAILURE() << "told while it is destroyed"; });
  const auto start = Clock::now();
  transport.reset();
  EXPECT_LT(Clock::now() - start, 4s);
  meeting.all.arrive_and_wait();
}

TEST(UcxClosing, HarmsNobodyWhateverIsUnderWay) {
  const char* wish = std::getenv("FARANDOLE_CLOSING_SEED");
  const unsigned first = wish != nullptr ? std::stoul(wish) : std::random_device()() % (1U << 30);
  std::cout << "FARANDOLE_CLOSING_SEED=" << first << "\n";
  int unfinished = 0;
  for (unsigned seed = first; seed < first + 60; ++seed) {
    Meeting meeting;
    const std::vector<Message> messages = randomMessages(seed);
    std::vector<std::jthread> ranks;
    ranks.reserve(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] { takePart(rank, messages, seed * kRanks + rank, meeting); });
    }
    ranks.clear();
    unfinished += meeting.unfinished;
  }
  EXPECT_GT(unfinished, 0) << "nobody left with anything under way";
}

}  // namespace
}  // namespace farandole::transport
