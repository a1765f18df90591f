#include "backend/transport/matcher.h"

#include <gtest/gtest.h>

#include <list>
#include <random>

namespace farandole::transport {
namespace {

constexpr std::uint64_t kExact = ~std::uint64_t{0};

// The rule, written down: two lists, walked from the oldest.
class Model {
 public:
  int takeReceive(std::uint64_t tag) {
    for (auto it = receives.begin(); it != receives.end(); ++it) {
      if (((it->wanted ^ tag) & it->mask) != 0) continue;
      const int id = it->id;
      receives.erase(it);
      return id;
    }
    return -1;
  }
  int takeMessage(std::uint64_t wanted, std::uint64_t mask) {
    for (auto it = messages.begin(); it != messages.end(); ++it) {
      if (((it->first ^ wanted) & mask) != 0) continue;
      const int id = it->second;
      messages.erase(it);
      return id;
    }
    return -1;
  }
  struct Receive {
    std::uint64_t wanted;
    std::uint64_t mask;
    int id;
  };
  std::list<Receive> receives;
  std::list<std::pair<std::uint64_t, int>> messages;
};

TEST(Matcher, MatchesAsTwoListsWalkedFromTheOldestDo) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 50; ++round) {
    Matcher matcher;
    Model model;
    std::vector<std::unique_ptr<Request>> requests;
    std::vector<int> posted;
    int messages = 0;
    const std::uint64_t numTags = 1 + random() % 100;
    for (int step = 0; step < 500; ++step) {
      const std::uint64_t tag = random() % numTags;
      const std::uint64_t mask = random() % 5 == 0 ? ~std::uint64_t{random() % 8} : kExact;
      switch (random() % 5) {
        case 0:
        case 1: {  // a message
          Request* const found = matcher.takeReceive(tag);
          const int expected = model.takeReceive(tag);
          ASSERT_EQ(found != nullptr ? static_cast<int>(found->bytes) : -1, expected);
          if (found != nullptr) break;
          auto message = matcher.makeMessage();
          message->tag = tag;
          message->remoteId = static_cast<std::uint32_t>(messages);
          message->peer = tag % 3;
          message->remote = tag % 2 == 0 ? reinterpret_cast<const std::byte*>(&random) : nullptr;
          matcher.addMessage(std::move(message));
          model.messages.emplace_back(tag, messages++);
          break;
        }
        case 2:
        case 3: {  // a receive
          auto found = matcher.takeMessage(tag, mask);
          const int expected = model.takeMessage(tag, mask);
          ASSERT_EQ(found != nullptr ? static_cast<int>(found->remoteId) : -1, expected);
          if (found != nullptr) {
            matcher.recycle(std::move(found));
            break;
          }
          Request& request = *requests.emplace_back(std::make_unique<Request>());
          request.wanted = tag;
          request.mask = mask;
          request.bytes = requests.size() - 1;
          matcher.addReceive(request);
          model.receives.push_back({tag, mask, static_cast<int>(request.bytes)});
          break;
        }
        default: {  // one goes
          if (!requests.empty()) {
            Request& request = *requests[random() % requests.size()];
            const auto size = model.receives.size();
            std::erase_if(model.receives, [&](const auto& r) { return r.id == static_cast<int>(request.bytes); });
            ASSERT_EQ(matcher.removeReceive(request), model.receives.size() != size);
          }
          if (step % 50 == 0) {
            matcher.dropRemote(1);
            std::erase_if(model.messages, [](const auto& m) { return m.first % 3 == 1 && m.first % 2 == 0; });
          }
        }
      }
    }
  }
}

TEST(Matcher, DropsOneRemoteMessageByItsNumber) {
  Matcher matcher;
  const int there = 0;
  for (std::uint32_t id = 0; id < 3; ++id) {
    auto message = matcher.makeMessage();
    message->tag = 5;
    message->peer = 1;
    message->remoteId = id;
    message->remote = reinterpret_cast<const std::byte*>(&there);
    matcher.addMessage(std::move(message));
  }
  EXPECT_TRUE(matcher.dropRemote(1, 1));
  EXPECT_FALSE(matcher.dropRemote(1, 1));
  EXPECT_FALSE(matcher.dropRemote(2, 0));
  EXPECT_EQ(matcher.takeMessage(5, kExact)->remoteId, 0u);
  EXPECT_EQ(matcher.takeMessage(5, kExact)->remoteId, 2u);
  EXPECT_EQ(matcher.takeMessage(5, kExact), nullptr);
}

}  // namespace
}  // namespace farandole::transport
