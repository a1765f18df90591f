#include "ddp/bucket_tuning.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace farandole::ddp {
namespace {

constexpr double kStep = 1.25;                     // from one candidate to the next
constexpr int64_t kSmallest = 1 << 10;             // elements: less is all latency
constexpr int kEqualBuckets[] = {1, 2, 4, 8, 16};  // before a small last one
constexpr double kEqual = 0.001;                   // of the backward and what is exposed: a difference that is none
constexpr double kWorthwhile = 0.02;               // of that: what measured times can be trusted in

Status check(const TuningFacts& facts) {
  const std::size_t count = facts.parameters.size();
  if (count > 0 && facts.gradBytes.size() == count && facts.ready.size() == count) return Status::ok();
  return Status::invalidArgument("facts are of " + std::to_string(count) + " parameters, " +
                                 std::to_string(facts.gradBytes.size()) + " sizes and " +
                                 std::to_string(facts.ready.size()) + " times: expected equal numbers, at least 1");
}

double endOf(const TuningFacts& facts) {
  return std::max(facts.end, *std::max_element(facts.ready.begin(), facts.ready.end()));
}

Result<Prediction> predict(const TuningFacts& facts, const ReductionCost& cost, int64_t bucketSize) {
  LayoutOptions options = facts.layout;
  options.bucketSize = bucketSize;
  Result<Layout> layout = layoutBuckets(facts.parameters, options);
  if (!layout) return layout.status();
  return Prediction{bucketSize, static_cast<int>(layout->buckets.size()), exposedBy(*layout, facts, cost)};
}

}  // namespace

double exposedBy(const Layout& layout, const TuningFacts& facts, const ReductionCost& cost) {
  std::vector<std::pair<double, double>> reductions;  // when it can begin, how long it takes
  for (const BucketLayout& bucket : layout.buckets) {
    double ready = 0;
    for (int parameter : bucket.parameters) ready = std::max(ready, facts.ready[parameter]);
    const int first = bucket.parameters.front();  // a buffer has one type
    const auto bytes = static_cast<double>((bucket.end - bucket.begin) * facts.gradBytes[first]);
    reductions.emplace_back(ready, cost.seconds(bytes));
  }
  std::stable_sort(reductions.begin(), reductions.end(),
                   [](const auto& left, const auto& right) { return left.first < right.first; });
  double end = 0;
  double late = 0;  // the backward, for what it has started
  for (const auto& [ready, seconds] : reductions) {
    late += facts.start;
    end = std::max(end, ready + late) + seconds;
  }
  return std::max(end, endOf(facts) + late) - endOf(facts);
}

std::vector<int64_t> candidateSizes(const TuningFacts& facts) {
  int64_t total = 0;
  for (const ParameterSpec& parameter : facts.parameters) total += parameter.numel;
  std::vector<int64_t> sizes = {total + 1};
  for (auto size = static_cast<double>(kSmallest); size <= static_cast<double>(total); size *= kStep) {
    sizes.push_back(static_cast<int64_t>(size));
  }
  int64_t tail = 0;
  double next = 1;
  for (const ParameterSpec& parameter : facts.parameters) {
    tail += parameter.numel;
    if (tail > total / 2) break;
    if (static_cast<double>(tail) < next) continue;
    next = static_cast<double>(tail) * kStep;
    for (const int count : kEqualBuckets) sizes.push_back((total - tail + count - 1) / count);
  }
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  return sizes;
}

Result<TuningChoice> chooseBucketSize(const TuningFacts& facts, const ReductionCost& cost) {
  FARANDOLE_RETURN_IF_ERROR(check(facts));
  const std::vector<int64_t> sizes = candidateSizes(facts);
  TuningChoice choice;
  choice.backward = endOf(facts) - *std::min_element(facts.ready.begin(), facts.ready.end());
  const Result<Prediction> now = predict(facts, cost, facts.layout.bucketSize.value_or(sizes.back()));
  if (!now) return now.status();
  std::vector<Prediction> predictions;
  for (const int64_t size : sizes) {
    Result<Prediction> prediction = predict(facts, cost, size);
    if (!prediction) return prediction.status();
    predictions.push_back(*prediction);
  }
  double least = now->exposed;
  for (const Prediction& prediction : predictions) least = std::min(least, prediction.exposed);
  choice.now = choice.best = *now;
  const double round = choice.backward + now->exposed;
  for (const Prediction& prediction : predictions) {
    if (prediction.exposed <= least + kEqual * round) choice.best = prediction;
  }
  choice.isWorthwhile = now->exposed - choice.best.exposed > kWorthwhile * round;
  if (!choice.isWorthwhile) choice.best = *now;
  return choice;
}

}  // namespace farandole::ddp
