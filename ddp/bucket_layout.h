#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/common/status.h"

namespace farandole::ddp {

// One trainable parameter as the layout sees it. Data types are opaque ids: only their equality matters.
struct ParameterSpec {
  int64_t numel = 0;
  int paramType = 0;
  int gradType = 0;
  bool isExpert = false;      // reduced over the expert data-parallel group (Megatron's param.allreduce == False)
  bool hasOwnBucket = false;  // where sharded: an embedding that pipeline stages share, which is reduced between them
};

// Sizes and paddings are those of Megatron-core's DistributedDataParallel (param_layout.py, distrib_optimizer.py).
struct LayoutOptions {
  std::optional<int64_t> bucketSize = 40'000'000;  // elements: a bucket closes as soon as it spans so many, or never
  int worldSize = 1;                               // ranks that share a bucket
  int expertWorldSize = 1;                         // ranks that share a bucket of experts
  // Each rank owns an equal part of every bucket: parameters start at multiples of 64
  // elements and buckets end at multiples of lcm(ranks, 128). Else nothing is padded.
  bool sharded = false;
  bool padForBusBandwidth = false;  // where sharded: buckets end at multiples of 65536 elements, too
};

// Where one parameter's gradient lies. Offsets are elements from the start of its buffer.
struct Slot {
  int buffer = 0;
  int bucket = 0;
  int64_t offset = 0;
  int64_t numel = 0;
};

struct BufferLayout {
  int paramType = 0;
  int gradType = 0;
  bool isExpert = false;
  int64_t numel = 0;
};

// The range [begin, end) of a buffer, padding included; the buckets of a buffer tile it.
struct BucketLayout {
  int buffer = 0;
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<int> parameters;  // in reverse registration order
};

// The result of layoutBuckets. Buckets are in the order of their issue: by the
// last parameter that each waits for, when gradients come in reverse
// registration order.
struct Layout {
  std::vector<BufferLayout> buffers;
  std::vector<BucketLayout> buckets;
  std::vector<Slot> slots;  // by parameter, in registration order
};

// Lays parameters, given in registration order, into one buffer per (parameter
// type, gradient type, expert or not), in reverse: gradients of the last layers come first.
Result<Layout> layoutBuckets(std::span<const ParameterSpec> parameters, const LayoutOptions& options);

// One line per bucket: buffer, range, parameters.
std::string toString(const Layout& layout);

}  // namespace farandole::ddp
