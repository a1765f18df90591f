#pragma once

#include <cstdint>

namespace farandole::pipeline {

// What a message between two stages carries. Starts at 1, so that no tag of
// the pipeline is below 2^29: small tags stay free for users of the group.
enum class Traffic : std::int32_t { kActivation = 1, kGradient = 2, kHeader = 3 };

inline constexpr std::int32_t kMaxStages = 1 << 9;
inline constexpr std::int32_t kMaxEdges = 1 << 9;
inline constexpr std::int32_t kMaxMicrobatches = 1 << 14;
inline constexpr std::int32_t kMaxTensorsPerMessage = 1 << 6;

// A tag that fits c10d's int: 2 bits traffic, 9 edge between stages, 14 microbatch, 6
// tensor. A step uses each tag once per pair of ranks, and matching is first in
// first out within a tag, so that a rank that is a step ahead does no harm.
constexpr std::int32_t messageTag(Traffic traffic, std::int32_t edge, std::int32_t microbatch, std::int32_t tensor) {
  return (static_cast<std::int32_t>(traffic) << 29) | (edge << 20) | (microbatch << 6) | tensor;
}

}  // namespace farandole::pipeline
