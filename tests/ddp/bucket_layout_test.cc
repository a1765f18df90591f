#include "ddp/bucket_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <utility>

namespace farandole::ddp {
namespace {

struct Case {
  std::vector<ParameterSpec> parameters;
  LayoutOptions options;
};

Case randomCase(uint64_t seed) {
  std::mt19937_64 random(seed);
  auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  Case result;
  const int64_t types = 1 + below(4);
  const int64_t largest = int64_t{1} << below(18);
  result.parameters.resize(below(60));
  for (ParameterSpec& spec : result.parameters) {
    spec = {below(largest + 1), static_cast<int>(below(types)), static_cast<int>(below(2)), below(4) == 0,
            below(10) == 0};
  }
  result.options.bucketSize = 1 + below(int64_t{1} << below(20));
  if (below(8) == 0) result.options.bucketSize.reset();
  result.options.worldSize = static_cast<int>(1 + below(48));
  result.options.expertWorldSize = static_cast<int>(1 + below(12));
  result.options.sharded = below(2) == 1;
  result.options.padForBusBandwidth = below(8) == 0;
  return result;
}

constexpr uint64_t kCases = 1000;

template <typename Check>
void forRandomLayouts(Check check) {
  for (uint64_t seed = 0; seed < kCases && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Case given = randomCase(seed);
    const Result<Layout> layout = layoutBuckets(given.parameters, given.options);
    ASSERT_TRUE(layout) << layout.status().toString();
    check(given, *layout);
  }
}

TEST(BucketLayout, EveryParameterLiesInExactlyOneBucketOfTheBufferOfItsTypes) {
  forRandomLayouts([](const Case& given, const Layout& layout) {
    std::vector<int> seen(given.parameters.size(), 0);
    for (size_t b = 0; b < layout.buckets.size(); ++b) {
      const BucketLayout& bucket = layout.buckets[b];
      ASSERT_FALSE(bucket.parameters.empty());
      for (int p : bucket.parameters) {
        ++seen[p];
        const Slot& slot = layout.slots[p];
        EXPECT_EQ(slot.bucket, static_cast<int>(b));
        EXPECT_EQ(slot.buffer, bucket.buffer);
        EXPECT_EQ(slot.numel, given.parameters[p].numel);
        EXPECT_EQ(layout.buffers[slot.buffer].paramType, given.parameters[p].paramType);
        EXPECT_EQ(layout.buffers[slot.buffer].gradType, given.parameters[p].gradType);
        EXPECT_EQ(layout.buffers[slot.buffer].isExpert, given.parameters[p].isExpert);
      }
    }
    EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }));
    std::set<std::tuple<int, int, bool>> types;
    for (const BufferLayout& buffer : layout.buffers) {
      EXPECT_TRUE(types.emplace(buffer.paramType, buffer.gradType, buffer.isExpert).second)
          << "two buffers of one kind";
    }
  });
}

TEST(BucketLayout, ParametersAreAlignedAndNeverOverlapNorLeaveTheirBucket) {
  forRandomLayouts([](const Case& given, const Layout& layout) {
    std::vector<std::vector<char>> used;
    for (const BufferLayout& buffer : layout.buffers) used.emplace_back(buffer.numel, 0);
    for (const Slot& slot : layout.slots) {
      EXPECT_EQ(slot.offset % (given.options.sharded ? 64 : 1), 0);
      EXPECT_GE(slot.offset, layout.buckets[slot.bucket].begin);
      EXPECT_LE(slot.offset + slot.numel, layout.buckets[slot.bucket].end);
      for (int64_t i = slot.offset; i < slot.offset + slot.numel; ++i) {
        ASSERT_EQ(used[slot.buffer][i], 0) << "element " << i << " is used twice";
        used[slot.buffer][i] = 1;
      }
    }
  });
}

TEST(BucketLayout, BucketsTileTheirBuffersInOrder) {
  forRandomLayouts([](const Case&, const Layout& layout) {
    std::vector<int64_t> end(layout.buffers.size(), 0);
    for (const BucketLayout& bucket : layout.buckets) {
      EXPECT_EQ(bucket.begin, end[bucket.buffer]);
      EXPECT_GE(bucket.end, bucket.begin);
      end[bucket.buffer] = bucket.end;
    }
    for (size_t i = 0; i < end.size(); ++i) EXPECT_EQ(end[i], layout.buffers[i].numel);
  });
}

TEST(BucketLayout, ParametersComeInReverseRegistrationOrder) {
  forRandomLayouts([](const Case&, const Layout& layout) {
    std::vector<int64_t> lastOffset(layout.buffers.size(), -1);
    for (size_t p = layout.slots.size(); p-- > 0;) {
      const Slot& slot = layout.slots[p];
      EXPECT_GE(slot.offset, lastOffset[slot.buffer]);
      lastOffset[slot.buffer] = slot.offset;
    }
  });
}

TEST(BucketLayout, BucketsAreInTheOrderInWhichReverseGradientsFillThem) {
  forRandomLayouts([](const Case&, const Layout& layout) {
    std::vector<size_t> missing;
    for (const BucketLayout& bucket : layout.buckets) missing.push_back(bucket.parameters.size());
    std::vector<int> filled;
    for (size_t p = layout.slots.size(); p-- > 0;) {
      if (--missing[layout.slots[p].bucket] == 0) filled.push_back(layout.slots[p].bucket);
    }
    std::vector<int> expected(layout.buckets.size());
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(filled, expected);
  });
}

TEST(BucketLayout, ABucketClosesWithTheFirstParameterThatReachesItsSizeOrStandsAlone) {
  forRandomLayouts([](const Case& given, const Layout& layout) {
    const int64_t size = given.options.bucketSize.value_or(std::numeric_limits<int64_t>::max());
    const auto isAlone = [&](int p) { return given.options.sharded && given.parameters[p].hasOwnBucket; };
    std::vector<const BucketLayout*> previous(layout.buffers.size(), nullptr);
    for (const BucketLayout& bucket : layout.buckets) {
      if (const BucketLayout* before = std::exchange(previous[bucket.buffer], &bucket)) {
        const Slot& closing = layout.slots[before->parameters.back()];
        EXPECT_TRUE(closing.offset + closing.numel - before->begin >= size || isAlone(before->parameters.back()) ||
                    isAlone(bucket.parameters.front()));
      }
      for (size_t i = 0; i + 1 < bucket.parameters.size(); ++i) {
        const Slot& slot = layout.slots[bucket.parameters[i]];
        EXPECT_LT(slot.offset + slot.numel - bucket.begin, size);
        EXPECT_FALSE(isAlone(bucket.parameters[i]) || isAlone(bucket.parameters[i + 1]));
      }
    }
  });
}

TEST(BucketLayout, ShardedBucketsSplitEvenlyIntoAlignedParts) {
  forRandomLayouts([](const Case& given, const Layout& layout) {
    if (!given.options.sharded) return;
    for (const BucketLayout& bucket : layout.buckets) {
      const int ranks =
          layout.buffers[bucket.buffer].isExpert ? given.options.expertWorldSize : given.options.worldSize;
      EXPECT_EQ((bucket.end - bucket.begin) % std::lcm<int64_t>(ranks, 128), 0);
      if (given.options.padForBusBandwidth) {
        EXPECT_EQ(bucket.end % 65536, 0);
      }
    }
  });
}

TEST(BucketLayout, PaddingStaysBelowOneMultiplePerParameterAndBucketAndIsNoneWithoutShards) {
  forRandomLayouts([](const Case& given, const Layout& layout) {
    int64_t padding = 0;
    for (const BufferLayout& buffer : layout.buffers) padding += buffer.numel;
    for (const ParameterSpec& spec : given.parameters) padding -= spec.numel;
    if (!given.options.sharded) {
      EXPECT_EQ(padding, 0);
      return;
    }
    int64_t bound = 64 * static_cast<int64_t>(given.parameters.size());
    for (const BucketLayout& bucket : layout.buckets) {
      const int ranks =
          layout.buffers[bucket.buffer].isExpert ? given.options.expertWorldSize : given.options.worldSize;
      bound += std::lcm(std::lcm<int64_t>(ranks, 128), given.options.padForBusBandwidth ? int64_t{65536} : 1);
    }
    EXPECT_LE(padding, bound);
  });
}

TEST(BucketLayout, PrintsOneLinePerBucket) {
  const std::vector<ParameterSpec> parameters = {{100, 0, 0}, {10, 0, 0}, {7, 1, 1}};
  const Result<Layout> layout = layoutBuckets(parameters, {.bucketSize = 10});
  ASSERT_TRUE(layout);
  EXPECT_EQ(toString(*layout),
            "bucket 0: buffer 0 [0, 7) parameters 2\n"
            "bucket 1: buffer 1 [0, 10) parameters 1\n"
            "bucket 2: buffer 1 [10, 110) parameters 0\n");
}

TEST(BucketLayout, RefusesBadInputByNameValueAndExpectation) {
  const std::vector<ParameterSpec> good = {{4, 0, 0}};
  auto message = [](std::span<const ParameterSpec> parameters, const LayoutOptions& options) {
    const Result<Layout> layout = layoutBuckets(parameters, options);
    EXPECT_FALSE(layout);
    EXPECT_EQ(layout.status().code(), StatusCode::kInvalidArgument);
    return std::string(layout.status().message());
  };
  EXPECT_EQ(message(good, {.bucketSize = 0}), "bucketSize=0: expected at least 1");
  EXPECT_EQ(message(good, {.expertWorldSize = 0}), "expertWorldSize=0: expected at least 1");
  EXPECT_EQ(message(good, {.worldSize = -2}), "worldSize=-2: expected at least 1");
  const std::vector<ParameterSpec> negative = {{4, 0, 0}, {-1, 0, 0}};
  EXPECT_NE(message(negative, {}).find("parameters[1].numel=-1"), std::string::npos);
  const std::vector<ParameterSpec> huge = {{int64_t{1} << 60, 0, 0}, {1, 0, 0}};
  EXPECT_NE(message(huge, {}).find("parameters[0].numel=1152921504606846976"), std::string::npos);
}

}  // namespace
}  // namespace farandole::ddp
