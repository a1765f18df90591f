#include "ddp/bucket_tuning.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

namespace farandole::ddp {
namespace {

constexpr uint64_t kSeeds = 200;
constexpr double kEqual = 0.001;  // of the round: the choice may be so much worse

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
  if (below(2) == 0) result.facts.end = step * static_cast<double>(below(2 * static_cast<int64_t>(count)));
  if (below(2) == 0) result.facts.start = 1e-6 * static_cast<double>(below(500));
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
  // Who starts the i-th in turn does so once more late.
  std::stable_sort(waiting.begin(), waiting.end(),
                   [](const Pending& left, const Pending& right) { return left.ready < right.ready; });
  const double late = facts.start * static_cast<double>(waiting.size());
  for (std::size_t i = 0; i < waiting.size(); ++i) waiting[i].ready += facts.start * static_cast<double>(i + 1);
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
  const double last = std::max(facts.end, *std::max_element(facts.ready.begin(), facts.ready.end()));
  return std::max(now, last + late) - last;
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

// Gradients of a million elements every 10 ms; `rate` in bytes a second.
TuningChoice chooseForEqual(int parameters, double rate, double start) {
  TuningFacts facts;
  for (int p = 0; p < parameters; ++p) {
    facts.parameters.push_back({1'000'000, 0, 0, false, false});
    facts.gradBytes.push_back(4);
    facts.ready.push_back(1e-2 * (parameters - 1 - p));
  }
  facts.layout.bucketSize = 1'000'000'000;
  facts.start = start;
  return *chooseBucketSize(facts, *ReductionCost::fromMeasured({{0, 0}, {1e9, 1e9 / rate}}));
}

TEST(BucketTuning, WhatComesLastIsInASmallBucketAndTheRestInAsFewAsCanBeHidden) {
  // One parameter takes 0.4 ms, all but the last one 7.6.
  const TuningChoice quick = chooseForEqual(20, 1e10, 1e-4);
  EXPECT_EQ(quick.best.buckets, 2);
  EXPECT_EQ(quick.best.bucketSize, 19'000'000);
  EXPECT_NEAR(quick.best.exposed, 4e-4 + 2e-4, 1e-9);
  // Each takes 6 ms: of two buckets the first one would take 114.
  const TuningChoice slow = chooseForEqual(20, 4e6 / 6e-3, 1e-4);
  EXPECT_GE(slow.best.buckets, 6);
  EXPECT_LT(slow.best.exposed, 13e-3);
  // Where to start one is dear there are fewer.
  const TuningChoice dear = chooseForEqual(20, 4e6 / 6e-3, 4e-3);
  EXPECT_LT(dear.best.buckets, slow.best.buckets);
}

TEST(BucketTuning, WhatIsHiddenAfterTheLastGradientNeedsNoOtherBuckets) {
  TuningFacts facts;
  for (int p = 0; p < 10; ++p) {
    facts.parameters.push_back({1'000'000, 0, 0, false, false});
    facts.gradBytes.push_back(4);
    facts.ready.push_back(1e-2 * (9 - p));
  }
  facts.layout.bucketSize = 1'000'000'000;
  const ReductionCost cost = *ReductionCost::fromMeasured({{0, 0}, {1e9, 0.5}});  // 20 ms for all
  facts.end = 0.2;
  const Result<TuningChoice> hidden = chooseBucketSize(facts, cost);
  EXPECT_FALSE(hidden->isWorthwhile);
  EXPECT_EQ(hidden->now.exposed, 0);
  EXPECT_NEAR(hidden->backward, 0.2, 1e-12);
  facts.end = 0.1;
  const Result<TuningChoice> half = chooseBucketSize(facts, cost);
  EXPECT_TRUE(half->isWorthwhile);
  EXPECT_NEAR(half->now.exposed, 0.01, 1e-9);
}

TEST(BucketTuning, FactsThatDoNotFitTogetherAreRefused) {
  Case given = randomCase(1);
  given.facts.ready.pop_back();
  EXPECT_FALSE(chooseBucketSize(given.facts, *ReductionCost::fromMeasured(given.points)));
  EXPECT_FALSE(chooseBucketSize({}, *ReductionCost::fromMeasured(given.points)));
}

}  // namespace
}  // namespace farandole::ddp
