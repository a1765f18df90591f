#include "backend/transport/nccl/edge_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/random_seed.h"

namespace farandole::transport {
namespace {

using farandole::testing::someSeed;
using Order = EdgeOrder::Order;
using Notes = std::vector<EdgeNote>;

// One end of an edge: what it posts, and what it has launched.
class End {
 public:
  explicit End(bool isSend) { base_.flags = isSend ? EdgeWord::kIsSend : 0; }

  void post(Notes notes) {
    const auto outcome = order_.post(notes, base_);
    ASSERT_TRUE(outcome) << outcome.status().toString();
    difference = difference || outcome->difference.has_value();
    order_.takeUntold(told_);
    if (outcome->order == Order::kByTag) sort(notes);
    if (outcome->order == Order::kUnknown || !waiting_.empty()) {
      waiting_.push_back({std::move(notes), outcome->order});
    } else {
      launch(notes);
    }
  }
  Result<EdgeOrder::Outcome> tryPost(const Notes& notes) { return order_.post(notes, base_); }
  void end() {
    order_.end(base_);
    order_.takeUntold(told_);
  }
  bool hasTold() const { return !told_.empty(); }
  // The other end hears the next word.
  EdgeOrder::Outcome tellTo(End& other) {
    const EdgeWord word = told_.front();
    told_.erase(told_.begin());
    EXPECT_EQ(word.flags & EdgeWord::kIsSend, base_.flags);
    return other.hear(word);
  }
  bool isWaiting() const { return !waiting_.empty(); }

  Notes launched;
  bool difference = false;

 private:
  static void sort(Notes& notes) { std::ranges::stable_sort(notes, {}, &EdgeNote::tag); }
  void launch(const Notes& notes) { launched.insert(launched.end(), notes.begin(), notes.end()); }
  EdgeOrder::Outcome hear(const EdgeWord& word) {
    const auto outcome = order_.hear(word);
    difference = difference || outcome.difference.has_value();
    EXPECT_FALSE(outcome.hasSettled && waiting_.empty());
    while (!waiting_.empty()) {
      auto& [notes, order] = waiting_.front();
      if (order == Order::kUnknown) {
        const auto settled = order_.takeSettled();
        if (!settled) break;
        if (*settled == Order::kByTag) sort(notes);
      }
      launch(notes);
      waiting_.pop_front();
    }
    return outcome;
  }

  EdgeOrder order_;
  EdgeWord base_{};
  std::vector<EdgeWord> told_;
  std::deque<std::pair<Notes, Order>> waiting_;
};

// A random order in which messages of one tag keep theirs.
Notes reordered(const Notes& notes, std::mt19937_64& rng) {
  Notes tags = notes;
  std::ranges::shuffle(tags, rng);
  Notes left = notes;
  Notes result;
  for (const EdgeNote& next : tags) {
    const auto found = std::ranges::find(left, next.tag, &EdgeNote::tag);
    result.push_back(*found);
    left.erase(found);
  }
  return result;
}

using Posts = std::vector<Notes>;

// Both ends post theirs at random times, and hear of the other's at random times.
void run(End& sender, const Posts& sent, End& receiver, const Posts& received, std::mt19937_64& rng) {
  std::size_t numSent = 0;
  std::size_t numReceived = 0;
  const auto isPosted = [](const End& end, std::size_t count, const Posts& posts) {
    return count == posts.size() || end.difference;
  };
  while (!isPosted(sender, numSent, sent) || !isPosted(receiver, numReceived, received) || sender.hasTold() ||
         receiver.hasTold()) {
    switch (rng() % 4) {
      case 0:
        if (numSent < sent.size() && !sender.difference) sender.post(sent[numSent++]);
        break;
      case 1:
        if (numReceived < received.size() && !receiver.difference) receiver.post(received[numReceived++]);
        break;
      case 2:
        if (sender.hasTold()) sender.tellTo(receiver);
        break;
      default:
        if (receiver.hasTold()) receiver.tellTo(sender);
        break;
    }
    if (::testing::Test::HasFatalFailure()) return;
  }
}

Posts randomPosts(std::mt19937_64& rng) {
  Posts kinds(3);
  for (Notes& kind : kinds) {
    const std::size_t count = 1 + rng() % 5;
    for (std::size_t i = 0; i < count; ++i) {
      kind.push_back({static_cast<std::uint32_t>(rng() % 4), static_cast<std::uint32_t>(rng() % 2), rng() % 3 * 100});
    }
  }
  // A program that runs in steps: its batches come again.
  Posts posts(12);
  for (Notes& post : posts) post = kinds[rng() % kinds.size()];
  return posts;
}

Notes flat(const Posts& posts) {
  Notes all;
  for (const Notes& post : posts) all.insert(all.end(), post.begin(), post.end());
  return all;
}

TEST(EdgeOrder, BatchesThatHaveTheSameMessagesAreLaunchedAlikeInWhateverOrderTheyAreListed) {
  const std::uint64_t first = someSeed();
  for (std::uint64_t seed = first; seed < first + 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed);
    const Posts sent = randomPosts(rng);
    Posts received = sent;
    for (Notes& post : received) post = reordered(post, rng);
    End sender(true);
    End receiver(false);
    run(sender, sent, receiver, received, rng);
    EXPECT_FALSE(sender.difference || receiver.difference);
    EXPECT_FALSE(sender.isWaiting() || receiver.isWaiting());
    EXPECT_EQ(sender.launched.size(), flat(sent).size());
    EXPECT_EQ(sender.launched, receiver.launched);
    if (HasFailure()) return;
  }
}

TEST(EdgeOrder, WhereOneEndHasNoSuchBatchTheOrderOfIssueStandsOnBoth) {
  const std::uint64_t first = someSeed();
  for (std::uint64_t seed = first; seed < first + 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed);
    const Posts sent = randomPosts(rng);
    // The same messages in the same order, cut elsewhere; no batch is one of the other side's, unless it ascends.
    Posts received;
    for (const EdgeNote& note : flat(sent)) received.push_back({note});
    End sender(true);
    End receiver(false);
    run(sender, sent, receiver, received, rng);
    EXPECT_FALSE(sender.difference || receiver.difference);
    EXPECT_FALSE(sender.isWaiting() || receiver.isWaiting());
    EXPECT_EQ(sender.launched, flat(sent));
    EXPECT_EQ(receiver.launched, flat(sent));
    if (HasFailure()) return;
  }
}

TEST(EdgeOrder, WhatIsLaunchedOtherwiseIsADifferenceOnBothEnds) {
  const std::uint64_t first = someSeed();
  int differing = 0;
  for (std::uint64_t seed = first; seed < first + 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed);
    const Posts sent = randomPosts(rng);
    Posts received = sent;
    for (Notes& post : received) post = reordered(post, rng);
    Notes& spoiled = received[rng() % received.size()];
    switch (rng() % 3) {
      case 0: ++spoiled[rng() % spoiled.size()].bytes; break;
      case 1: ++spoiled[rng() % spoiled.size()].tag; break;
      default: std::swap(received.front(), spoiled); break;
    }
    End sender(true);
    End receiver(false);
    run(sender, sent, receiver, received, rng);
    const std::size_t both = std::min(sender.launched.size(), receiver.launched.size());
    const bool isSame = std::equal(sender.launched.begin(), sender.launched.begin() + static_cast<long>(both),
                                   receiver.launched.begin());
    EXPECT_EQ(sender.difference, !isSame);
    EXPECT_EQ(receiver.difference, !isSame);
    differing += isSame ? 0 : 1;
    if (HasFailure()) return;
  }
  EXPECT_GT(differing, 300);
}

TEST(EdgeOrder, ABatchWhoseOrderWasAgreedOnOnceDoesNotWaitAgain) {
  End sender(true);
  End receiver(false);
  const Notes sent{{2, 1, 10}, {1, 1, 20}};
  const Notes received{{1, 1, 20}, {2, 1, 10}};
  sender.post(sent);
  EXPECT_TRUE(sender.isWaiting());
  receiver.post(received);
  EXPECT_FALSE(receiver.isWaiting()) << "its tags ascend";
  while (receiver.hasTold()) receiver.tellTo(sender);
  EXPECT_FALSE(sender.isWaiting());
  sender.post(sent);
  EXPECT_FALSE(sender.isWaiting());
  EXPECT_EQ(sender.launched, (Notes{{1, 1, 20}, {2, 1, 10}, {1, 1, 20}, {2, 1, 10}}));

  // Should the other end do something else this time, both find out.
  receiver.post({sent[0]});
  receiver.post({sent[1]});
  while (receiver.hasTold()) receiver.tellTo(sender);
  while (sender.hasTold()) sender.tellTo(receiver);
  EXPECT_TRUE(sender.difference);
  EXPECT_TRUE(receiver.difference);
}

TEST(EdgeOrder, AfterACaptureNothingIsToldAndOnlyAscendingTagsAreTaken) {
  End sender(true);
  End receiver(false);
  sender.post({{2, 1, 10}, {1, 1, 20}});
  EXPECT_TRUE(sender.isWaiting());
  receiver.end();
  EXPECT_TRUE(receiver.tellTo(sender).isStuck);
  for (End* const end : {&sender, &receiver}) {
    EXPECT_TRUE(end->tryPost({{1, 1, 20}, {2, 1, 10}}));
    const auto refused = end->tryPost({{4, 1, 20}, {3, 1, 10}});
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(sender.hasTold()) << "of what came before";
  EXPECT_FALSE(sender.tellTo(receiver).difference);
  EXPECT_FALSE(receiver.hasTold());
}

}  // namespace
}  // namespace farandole::transport
