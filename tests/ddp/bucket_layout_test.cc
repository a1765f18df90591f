#include "ddp/bucket_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

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
    spec = {below(largest + 1), static_cast<int>(below(types)), static_cast<int>(below(2))};
  }
  result.options.bucketSize = 1 + below(int64_t{1} << below(20));
  result.options.alignment = below(2) ? 64 : 1 + below(100);
  result.options.worldSize = static_cast<int>(1 + below(48));
  result.options.sharded = below(2) == 1;
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
      }
    }
    EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }));
    std::set<std::pair<int, int>> types;
    for (const BufferLayout& buffer : layout.buffers) {
      EXPECT_TRUE(types.emplace(buffer.paramType, buffer.gradType).second) << "two buffers of one kind";
    }
  });
}

TEST(BucketLayout, ParametersAreAlignedAndNeverOverlapNorLeaveTheirBucket) {
  forRandomLayouts([](const Case& given, const Layout& layout) {
    std::vector<std::vector<char>> used;
    for (const BufferLayout& buffer : layout.buffers) used.emplace_back(buffer.numel, 0);
    for (const Slot& slot : layout.slots) {
      EXPECT_EQ(slot.offset % given.options.alignment, 0);
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

TEST(BucketLayout, ABucketClosesWithTheFirstParameterThatReachesItsSize) {
  forRandomLayouts([](const Case& given, const Layout& layout) {
    std::vector<const BucketLayout*> last(layout.buffers.size(), nullptr);
    for (const BucketLayout& bucket : layout.buckets) last[bucket.buffer] = &bucket;
    for (const BucketLayout& bucket : layout.buckets) {
      const Slot& closing = layout.slots[bucket.parameters.back()];
      const int64_t size = closing.offset + closing.numel - bucket.begin;
      if (&bucket != last[bucket.buffer]) {
        EXPECT_GE(size, given.options.bucketSize);
      }
      if (bucket.parameters.size() > 1) {
        const Slot& before = layout.slots[bucket.parameters[bucket.parameters.size() - 2]];
        EXPECT_LT(before.offset + before.numel - bucket.begin, given.options.bucketSize);
      }
    }
  });
}

TEST(BucketLayout, ShardedBucketsSplitEvenlyIntoAlignedParts) {
  forRandomLayouts([](const Case& given, const Layout& layout) {
    if (!given.options.sharded) return;
    for (const BucketLayout& bucket : layout.buckets) {
      EXPECT_EQ((bucket.end - bucket.begin) % std::lcm<int64_t>(given.options.worldSize, 128), 0);
    }
  });
}

TEST(BucketLayout, PaddingStaysBelowOneMultiplePerParameterAndBucket) {
  forRandomLayouts([](const Case& given, const Layout& layout) {
    int64_t padding = 0;
    for (const BufferLayout& buffer : layout.buffers) padding += buffer.numel;
    for (const ParameterSpec& spec : given.parameters) padding -= spec.numel;
    const int64_t multiple = given.options.sharded
                                 ? std::lcm(given.options.alignment, std::lcm<int64_t>(given.options.worldSize, 128))
                                 : given.options.alignment;
    const auto bound = given.options.alignment * static_cast<int64_t>(given.parameters.size()) +
                       multiple * static_cast<int64_t>(layout.buckets.size());
    EXPECT_LE(padding, bound);
  });
}

TEST(BucketLayout, PrintsOneLinePerBucket) {
  const std::vector<ParameterSpec> parameters = {{100, 0, 0}, {10, 0, 0}, {7, 1, 1}};
  const Result<Layout> layout = layoutBuckets(parameters, {.bucketSize = 10});
  ASSERT_TRUE(layout);
  EXPECT_EQ(toString(*layout),
            "bucket 0: buffer 0 [0, 64) parameters 2\n"
            "bucket 1: buffer 1 [0, 64) parameters 1\n"
            "bucket 2: buffer 1 [64, 192) parameters 0\n");
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
  EXPECT_EQ(message(good, {.alignment = 0}), "alignment=0: expected at least 1");
  EXPECT_EQ(message(good, {.worldSize = -2}), "worldSize=-2: expected at least 1");
  const std::vector<ParameterSpec> negative = {{4, 0, 0}, {-1, 0, 0}};
  EXPECT_NE(message(negative, {}).find("parameters[1].numel=-1"), std::string::npos);
  const std::vector<ParameterSpec> huge = {{int64_t{1} << 60, 0, 0}, {1, 0, 0}};
  EXPECT_NE(message(huge, {}).find("parameters[0].numel=1152921504606846976"), std::string::npos);
}

}  // namespace
}  // namespace farandole::ddp
