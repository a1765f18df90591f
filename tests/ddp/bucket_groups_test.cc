#include "ddp/bucket_groups.h"

#include <gtest/gtest.h>

#include <random>

namespace farandole::ddp {
namespace {

constexpr int kQuantized = 7;

Layout layoutOf(const std::vector<ParameterSpec>& parameters) {
  Result<Layout> layout = layoutBuckets(parameters, {.bucketSize = 1});
  EXPECT_TRUE(layout);
  return std::move(*layout);
}

std::vector<std::vector<int>> bucketsOf(const std::vector<BucketGroupLayout>& groups) {
  std::vector<std::vector<int>> buckets;
  for (const BucketGroupLayout& group : groups) buckets.push_back(group.buckets);
  return buckets;
}

using Groups = std::vector<std::vector<int>>;

TEST(BucketGroups, EachBucketIsAGroupByItself) {
  EXPECT_EQ(bucketsOf(groupBuckets(layoutOf({{4, 0, 0}, {4, 1, 0}, {4, 0, 0}}), {})), (Groups{{0}, {1}, {2}}));
}

TEST(BucketGroups, WhatIsNotQuantizedJoinsTheLastThatIs) {
  // In reverse: a bias, a weight, a bias, a weight.
  const Layout layout = layoutOf({{4, kQuantized, 0}, {4, 0, 0}, {4, kQuantized, 0}, {4, 0, 0}});
  EXPECT_EQ(bucketsOf(groupBuckets(layout, {.quantizedType = kQuantized})), (Groups{{1}, {0, 2, 3}}));
}

TEST(BucketGroups, OneGroupWhereAskedButNeverOfDenseAndExpertBuckets) {
  const Layout layout = layoutOf({{4, 0, 0}, {4, 0, 0, true}, {4, 0, 0}, {4, 1, 0, true}});
  const auto groups = groupBuckets(layout, {.isSingle = true});
  EXPECT_EQ(bucketsOf(groups), (Groups{{0, 2}, {1, 3}}));
  EXPECT_TRUE(groups[0].isExpert);
  EXPECT_FALSE(groups[1].isExpert);
}

TEST(BucketGroups, EveryBucketIsInOneGroupOfItsKindAndGroupsAreInTheOrderOfTheirLastBuckets) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<ParameterSpec> parameters(random() % 20);
    for (ParameterSpec& spec : parameters) spec = {4, random() % 2 ? kQuantized : 0, 0, random() % 3 == 0};
    const Layout layout = layoutOf(parameters);
    const auto groups =
        groupBuckets(layout, {.isSingle = random() % 4 == 0, .quantizedType = random() % 2 ? kQuantized : -1});
    std::vector<int> seen(layout.buckets.size(), 0);
    int last = -1;
    for (const BucketGroupLayout& group : groups) {
      for (int bucket : group.buckets) {
        ++seen[bucket];
        EXPECT_EQ(layout.buffers[layout.buckets[bucket].buffer].isExpert, group.isExpert);
      }
      EXPECT_TRUE(std::is_sorted(group.buckets.begin(), group.buckets.end()));
      EXPECT_LT(last, group.buckets.back());
      last = group.buckets.back();
    }
    EXPECT_EQ(seen, std::vector<int>(layout.buckets.size(), 1));
  }
}

}  // namespace
}  // namespace farandole::ddp
