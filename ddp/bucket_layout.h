#pragma once

#include <cstdint>
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
};

struct LayoutOptions {
  int64_t bucketSize = 40'000'000;  // elements: a bucket closes as soon as it spans so many
  int64_t alignment = 64;           // elements: every parameter starts at a multiple
  int worldSize = 1;
  bool sharded = false;  // each rank owns an equal part of every bucket: pads buckets to lcm(worldSize, 128)
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
// type, gradient type), in reverse: gradients of the last layers come first.
Result<Layout> layoutBuckets(std::span<const ParameterSpec> parameters, const LayoutOptions& options);

// One line per bucket: buffer, range, parameters.
std::string toString(const Layout& layout);

}  // namespace farandole::ddp
