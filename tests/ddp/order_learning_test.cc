#include "ddp/order_learning.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/random_seed.h"

namespace farandole::ddp {
namespace {

using Places = std::vector<int>;

// Ranks that learn together, as the rounds of a reducer do it.
class Ranks {
 public:
  Ranks(std::size_t ranks, std::size_t groups) : ranks_(ranks, OrderLearning(groups)), learned_(groups, -1) {}

  // Whether any asked. Empty places: that rank's round shows none.
  bool round(const std::vector<Places>& placesByRank) {
    bool asks = false;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (!placesByRank[r].empty()) ranks_[r].note(placesByRank[r]);
      asks = ranks_[r].departs() || asks;
    }
    if (asks) {
      std::fill(learned_.begin(), learned_.end(), -1);
      for (OrderLearning& rank : ranks_) raise(learned_, rank.tell());
      for (OrderLearning& rank : ranks_) rank.learn(learned_);
    }
    for (OrderLearning& rank : ranks_) rank.endRound();
    return asks;
  }

  std::vector<std::size_t> order() const { return OrderLearning::orderOf(learned_); }

  static void raise(Places& places, const Places& others) {
    for (std::size_t g = 0; g < places.size(); ++g) places[g] = std::max(places[g], others[g]);
  }

 private:
  std::vector<OrderLearning> ranks_;
  Places learned_;
};

// Of groups that become ready in this order, the others not before the end.
Places placesOf(const std::vector<std::size_t>& arrivals, std::size_t groups) {
  Places places(groups, static_cast<int>(groups));
  for (std::size_t i = 0; i < arrivals.size(); ++i) places[arrivals[i]] = static_cast<int>(i);
  return places;
}

Places randomPlaces(std::mt19937_64& random, std::size_t groups) {
  std::vector<std::size_t> arrivals(groups);
  std::iota(arrivals.begin(), arrivals.end(), 0);
  std::shuffle(arrivals.begin(), arrivals.end(), random);
  arrivals.resize(groups - random() % (groups / 2 + 1));
  return placesOf(arrivals, groups);
}

TEST(OrderLearning, TheFirstRoundIsLearnedAndRoundsLikeItAskForNothingMore) {
  Ranks ranks(2, 3);
  const std::vector<Places> steady(2, {1, 2, 0});
  EXPECT_TRUE(ranks.round(steady));
  EXPECT_EQ(ranks.order(), (std::vector<std::size_t>{2, 0, 1}));
  for (int round = 0; round < 5 * OrderLearning::kWindow; ++round) EXPECT_FALSE(ranks.round(steady));
}

TEST(OrderLearning, RoundsInIndexOrderAskOnceAtMost) {
  Ranks ranks(2, 3);
  int asked = 0;
  for (int round = 0; round < 5 * OrderLearning::kWindow; ++round) asked += ranks.round({{0, 1, 2}, {0, 1, 2}}) ? 1 : 0;
  EXPECT_LE(asked, 1);
}

TEST(OrderLearning, RoundsThatShowNoOrderAskForNothing) {
  Ranks ranks(2, 3);
  for (int round = 0; round < 2 * OrderLearning::kWindow; ++round) EXPECT_FALSE(ranks.round({{}, {}}));
  EXPECT_TRUE(ranks.round({{}, {2, 1, 0}}));
  EXPECT_EQ(ranks.order(), (std::vector<std::size_t>{2, 1, 0}));
}

TEST(OrderLearning, WhatComesLaterForGoodIsLastFromTheNextRoundOn) {
  Ranks ranks(2, 4);
  const Places first = placesOf({3, 2, 0}, 4);  // 1 is not used
  for (int round = 0; round < 3; ++round) ranks.round({first, first});
  EXPECT_EQ(ranks.order(), (std::vector<std::size_t>{3, 2, 0, 1}));
  const Places later = placesOf({1, 2, 0}, 4);  // on one rank it is 3
  EXPECT_TRUE(ranks.round({first, later}));
  EXPECT_EQ(ranks.order(), (std::vector<std::size_t>{2, 0, 1, 3}));
  for (int round = 0; round < 2 * OrderLearning::kWindow; ++round) ranks.round({later, later});
  EXPECT_EQ(ranks.order(), (std::vector<std::size_t>{1, 2, 0, 3})) << "what comes earlier is learned, too";
}

TEST(OrderLearning, BranchesThatAlternateSettleOnAnOrderThatHasThemLast) {
  Ranks ranks(1, 4);
  const std::vector<Places> branches = {placesOf({0, 2, 3}, 4), placesOf({1, 2, 3}, 4)};
  for (int round = 0; round < 5 * OrderLearning::kWindow; ++round) {
    const bool asks = ranks.round({branches[round % 2]});
    EXPECT_EQ(asks, round < 2) << round;
    if (round > 0) {
      EXPECT_EQ(ranks.order(), (std::vector<std::size_t>{2, 3, 0, 1}));
    }
  }
}

// Against what all ranks' places in a phase say, looked at from outside.
TEST(OrderLearning, RandomPhasesEndInTheOrderOfTheLatestPlaces) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int model = 0; model < 200; ++model) {
    const std::size_t count = 1 + random() % 4;
    const std::size_t groups = 2 + random() % 9;
    Ranks ranks(count, groups);
    std::vector<Places> before;
    for (int phase = 0; phase < 4; ++phase) {
      std::vector<Places> places;
      for (std::size_t r = 0; r < count; ++r) places.push_back(randomPlaces(random, groups));
      Places latest(groups, -1);
      for (const Places& of : places) Ranks::raise(latest, of);
      ranks.round(places);
      // After one round nothing that comes on all ranks waits behind what does not come on some.
      Places both = latest;
      for (const Places& of : before) Ranks::raise(both, of);
      const auto order = ranks.order();
      bool isMissing = false;
      for (const std::size_t group : order) {
        const bool comes = both[group] < static_cast<int>(groups);
        EXPECT_FALSE(isMissing && comes) << group;
        isMissing = isMissing || latest[group] == static_cast<int>(groups);
      }
      for (int round = 0; round < 2 * OrderLearning::kWindow; ++round) ranks.round(places);
      EXPECT_EQ(ranks.order(), OrderLearning::orderOf(latest));
      for (int round = 0; round < 2 * OrderLearning::kWindow; ++round) EXPECT_FALSE(ranks.round(places));
      before = places;
    }
  }
}

}  // namespace
}  // namespace farandole::ddp
