#include "ddp/bucket_tuning.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

namespace farandole::ddp {
namespace {

constexpr uint64_t kSeeds = 200;
constexpr double kEqual = 0.005;  // of the round: the choice may be so much worse

struct Case {
  TuningFacts facts;
  std::vector<std::pair<double, double>> points;
};

// Parameters of one type, whose gradients come in about the reverse of their order.
Case randomCase(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  Case result;
  const auto count = static_cast<size_t>(1 + below(12));
  const int64_t largest = int64_t{1} << (4 + below(18));
  for (size_t p = 0; p < count; ++p) {
    result.facts.parameters.push_back({1 + below(largest), 0, 0, false, false});
    result.facts.gradBytes.push_back(4);
  }
  const double step = 1e-5 * static_cast<double>(1 + below(1000));
  for (size_t p = 0; p < count; ++p) {
    const auto late = static_cast<double>(count - 1 - p) + (below(4) == 0 ? static_cast<double>(below(4)) : 0);
    result.facts.ready.push_back(step * late);
  }
  result.facts.layout.bucketSize = 1 + below(4 * largest);
  const double latency = 1e-6 * static_cast<double>(1 + below(1000));
  const double rate = 1e7 * static_cast<double>(1 + below(1000));
  for (double bytes = 8; bytes < 1e8; bytes *= 64) result.points.emplace_back(bytes, latency + bytes / rate);
  return result;
}

// The same by itself: buckets cut here, and one reduction after the other in small steps of a queue.
double simulate(const TuningFacts& facts, int64_t bucketSize, const ReductionCost& cost) {
  struct Pending {
    double ready = 0;
    double seconds = 0;
  };
  std::vector<Pending> waiting;
  int64_t numel = 0;
  double ready = 0;
  for (size_t p = facts.parameters.size(); p-- > 0;) {
    numel += facts.parameters[p].numel;
    ready = std::max(ready, facts.ready[p]);
    if (numel < bucketSize && p > 0) continue;
    waiting.push_back({ready, cost.seconds(4.0 * static_cast<double>(numel))});
    numel = 0;
    ready = 0;
  }
  double now = 0;
  while (!waiting.empty()) {
    auto next = std::find_if(waiting.begin(), waiting.end(), [&](const Pending& one) { return one.ready <= now; });
    for (auto one = waiting.begin(); one != waiting.end(); ++one) {
      if (one->ready <= now && one->ready < next->ready) next = one;
    }
    if (next == waiting.end()) {
      now = std::numeric_limits<double>::max();
      for (const Pending& one : waiting) now = std::min(now, one.ready);
      continue;
    }
    now += next->seconds;
    waiting.erase(next);
  }
  return std::max(0.0, now - *std::max_element(facts.ready.begin(), facts.ready.end()));
}

TEST(BucketTuning, WhatIsExposedIsWhatASimulationSays) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Case given = randomCase(seed);
    const ReductionCost cost = *ReductionCost::fromMeasured(given.points);
    for (const int64_t size : candidateSizes(given.facts)) {
      LayoutOptions options = given.facts.layout;
      options.bucketSize = size;
      const Result<Layout> layout = layoutBuckets(given.facts.parameters, options);
      ASSERT_TRUE(layout);
      ASSERT_NEAR(exposedBy(*layout, given.facts, cost), simulate(given.facts, size, cost), 1e-9) << "size " << size;
    }
  }
}

TEST(BucketTuning, NoCandidateIsBetterAndNoBucketSizeBeatsEverySizeThereIs) {
  int changed = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Case given = randomCase(seed);
    const ReductionCost cost = *ReductionCost::fromMeasured(given.points);
    const Result<TuningChoice> choice = chooseBucketSize(given.facts, cost);
    ASSERT_TRUE(choice) << choice.status().toString();
    EXPECT_NEAR(choice->now.exposed, simulate(given.facts, *given.facts.layout.bucketSize, cost), 1e-9);
    EXPECT_NEAR(choice->best.exposed, simulate(given.facts, choice->best.bucketSize, cost), 1e-9);
    const double round = choice->backward + choice->now.exposed;
    double least = choice->now.exposed;
    for (const int64_t size : candidateSizes(given.facts)) least = std::min(least, simulate(given.facts, size, cost));
    if (choice->isWorthwhile) {
      ++changed;
      EXPECT_LE(choice->best.exposed, least + kEqual * round + 1e-9);
      EXPECT_LT(choice->best.exposed, choice->now.exposed);
    } else {
      EXPECT_EQ(choice->best.bucketSize, choice->now.bucketSize);
      EXPECT_GE(least, choice->now.exposed - 0.03 * round);
    }
    // Every size there is: each sum of neighbours closes other buckets.
    double optimum = std::numeric_limits<double>::max();
    for (size_t from = 0; from < given.facts.parameters.size(); ++from) {
      int64_t size = 0;
      for (size_t p = from; p < given.facts.parameters.size(); ++p) {
        size += given.facts.parameters[p].numel;
        optimum = std::min(optimum, simulate(given.facts, size, cost));
      }
    }
    EXPECT_GE(choice->best.exposed, optimum - 1e-9);
  }
  EXPECT_GT(changed, 10);
}

TEST(BucketTuning, LatencyAloneMakesOneBucketAndBandwidthAloneMakesMany) {
  TuningFacts facts;
  for (int p = 0; p < 100; ++p) {
    facts.parameters.push_back({100'000, 0, 0, false, false});
    facts.gradBytes.push_back(4);
    facts.ready.push_back(1e-3 * (99 - p));
  }
  facts.layout.bucketSize = 1'000'000;
  const auto onlyLatency = chooseBucketSize(facts, *ReductionCost::fromMeasured({{8, 0.05}, {1e8, 0.0500001}}));
  ASSERT_TRUE(onlyLatency);
  EXPECT_EQ(onlyLatency->best.buckets, 1);
  const auto onlyBandwidth = chooseBucketSize(facts, *ReductionCost::fromMeasured({{0, 0}, {1e8, 0.1}}));
  ASSERT_TRUE(onlyBandwidth);
  EXPECT_TRUE(onlyBandwidth->isWorthwhile);
  EXPECT_GE(onlyBandwidth->best.buckets, 30);
}

TEST(BucketTuning, FactsThatDoNotFitTogetherAreRefused) {
  Case given = randomCase(1);
  given.facts.ready.pop_back();
  EXPECT_FALSE(chooseBucketSize(given.facts, *ReductionCost::fromMeasured(given.points)));
  EXPECT_FALSE(chooseBucketSize({}, *ReductionCost::fromMeasured(given.points)));
}

}  // namespace
}  // namespace farandole::ddp
