#pragma once

#include <vector>

#include "ddp/bucket_layout.h"

namespace farandole::ddp {

// Buckets, by index, that are reduced and gathered together: when the gradients
// of all of them are there.
struct BucketGroupLayout {
  bool isExpert = false;
  std::vector<int> buckets;  // ascending
};

// What the grouping must know beside the layout.
struct GroupingOptions {
  bool isSingle = false;   // one group of all dense buckets, and one of all of experts
  int quantizedType = -1;  // the parameter type of buffers that hold float8 as bytes, if there are any
};

// Megatron-core's partition_buckets: each bucket by itself; but where there are
// quantized parameters, all other buckets (mostly biases) join the last quantized
// one, so that they add no collective of their own to the chain that
// CUDA_DEVICE_MAX_CONNECTIONS=1 makes. Dense and expert buckets never share a group,
// for they have other ranks. In the order of their issue: by the last bucket of each.
std::vector<BucketGroupLayout> groupBuckets(const Layout& layout, const GroupingOptions& options);

}  // namespace farandole::ddp
