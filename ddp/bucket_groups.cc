#include "ddp/bucket_groups.h"

#include <algorithm>

namespace farandole::ddp {
namespace {

bool isQuantized(const Layout& layout, int bucket, const GroupingOptions& options) {
  return layout.buffers[layout.buckets[bucket].buffer].paramType == options.quantizedType;
}

void addGroups(const Layout& layout, const std::vector<int>& buckets, bool isExpert, const GroupingOptions& options,
               std::vector<BucketGroupLayout>& groups) {
  if (buckets.empty()) return;
  if (options.isSingle) {
    groups.push_back({isExpert, buckets});
    return;
  }
  const auto last =
      std::find_if(buckets.rbegin(), buckets.rend(), [&](int bucket) { return isQuantized(layout, bucket, options); });
  std::vector<int> joined;
  for (int bucket : buckets) {
    if (last != buckets.rend() && (bucket == *last || !isQuantized(layout, bucket, options))) {
      joined.push_back(bucket);
    } else {
      groups.push_back({isExpert, {bucket}});
    }
  }
  if (!joined.empty()) groups.push_back({isExpert, joined});
}

}  // namespace

std::vector<BucketGroupLayout> groupBuckets(const Layout& layout, const GroupingOptions& options) {
  std::vector<BucketGroupLayout> groups;
  for (const bool isExpert : {false, true}) {
    std::vector<int> buckets;
    for (size_t bucket = 0; bucket < layout.buckets.size(); ++bucket) {
      if (layout.buffers[layout.buckets[bucket].buffer].isExpert == isExpert)
        buckets.push_back(static_cast<int>(bucket));
    }
    addGroups(layout, buckets, isExpert, options, groups);
  }
  std::sort(groups.begin(), groups.end(), [](const BucketGroupLayout& left, const BucketGroupLayout& right) {
    return left.buckets.back() < right.buckets.back();
  });
  return groups;
}

}  // namespace farandole::ddp
