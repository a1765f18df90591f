#pragma once

#include <cstdint>

namespace farandole::p2p {

// The 64 bits by which a transport matches messages:
//
//   63      50 49  48 47      32 31                 0
//  +----------+------+----------+--------------------+
//  |  group   | kind |  source  |      user tag      |
//  +----------+------+----------+--------------------+
//
// group     the receiver's own number for the group: each rank tells it to the
//           others when they meet, so that it need not be agreed on
// kind      keeps point-to-point messages and collectives apart
// source    the sender's rank in the group
// user tag  c10d's tag, or a collective's sequence number
enum class MessageKind : std::uint64_t { kPointToPoint = 0, kCollective = 1 };

inline constexpr int kGroupBits = 14;
inline constexpr std::uint32_t kMaxGroups = 1u << kGroupBits;
inline constexpr int kMaxRanks = 1 << 16;

inline constexpr std::uint64_t kExactMask = ~std::uint64_t{0};
inline constexpr std::uint64_t kAnySourceMask = ~(std::uint64_t{0xffff} << 32);

constexpr std::uint64_t makeTag(std::uint32_t group, MessageKind kind, int source, std::uint32_t userTag) {
  return std::uint64_t{group} << 50 | static_cast<std::uint64_t>(kind) << 48 |
         std::uint64_t{static_cast<std::uint16_t>(source)} << 32 | userTag;
}

constexpr int sourceOf(std::uint64_t tag) { return static_cast<int>(tag >> 32 & 0xffff); }

}  // namespace farandole::p2p
