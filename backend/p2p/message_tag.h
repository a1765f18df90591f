#pragma once

#include <cstdint>

namespace farandole::p2p {

// The 64 bits that a message carries, and by which a transport matches it:
//
//   63      53  52  51      37 36     31 30                0
//  +----------+----+----------+---------+-------------------+
//  |  group   |kind|  source  | element |     user tag      |
//  +----------+----+----------+---------+-------------------+
//
// group     the receiver's own number for the group: each rank tells it to the
//           others when they meet, so that it need not be agreed on
// kind      keeps point-to-point messages and collectives apart
// source    the sender's rank in the group
// element   what the message is made of: not matched, but compared (see Transport)
// user tag  c10d's tag, or a collective's sequence number
enum class MessageKind : std::uint64_t { kPointToPoint = 0, kCollective = 1 };

inline constexpr int kUserTagBits = 31;
inline constexpr int kElementBits = 6;
inline constexpr int kSourceBits = 15;
inline constexpr int kGroupBits = 11;
inline constexpr int kElementShift = kUserTagBits;
inline constexpr int kSourceShift = kElementShift + kElementBits;
inline constexpr int kKindShift = kSourceShift + kSourceBits;
inline constexpr int kGroupShift = kKindShift + 1;
static_assert(kGroupShift + kGroupBits == 64);

inline constexpr std::uint32_t kMaxGroups = 1u << kGroupBits;
inline constexpr int kMaxRanks = 1 << kSourceBits;
inline constexpr std::uint32_t kMaxElement = (1u << kElementBits) - 1;
// Larger ones wrap around: a collective's number may, among those that are in flight none is met twice.
inline constexpr std::uint32_t kMaxUserTag = (1u << kUserTagBits) - 1;

inline constexpr std::uint64_t kElementField = std::uint64_t{kMaxElement} << kElementShift;
inline constexpr std::uint64_t kSourceField = std::uint64_t{kMaxRanks - 1} << kSourceShift;

// What a receive wants to be equal: everything; all but the element; and all but the source, too.
inline constexpr std::uint64_t kExactMask = ~std::uint64_t{0};
inline constexpr std::uint64_t kAnyElementMask = ~kElementField;
inline constexpr std::uint64_t kAnySourceMask = ~(kElementField | kSourceField);

constexpr std::uint64_t makeTag(std::uint32_t group, MessageKind kind, int source, std::uint32_t userTag,
                                std::uint32_t element = 0) {
  return std::uint64_t{group} << kGroupShift | static_cast<std::uint64_t>(kind) << kKindShift |
         std::uint64_t{static_cast<std::uint32_t>(source)} << kSourceShift | std::uint64_t{element} << kElementShift |
         (userTag & kMaxUserTag);
}

constexpr int sourceOf(std::uint64_t tag) { return static_cast<int>((tag & kSourceField) >> kSourceShift); }
constexpr std::uint32_t elementOf(std::uint64_t tag) {
  return static_cast<std::uint32_t>((tag & kElementField) >> kElementShift);
}
constexpr std::uint32_t userTagOf(std::uint64_t tag) { return static_cast<std::uint32_t>(tag & kMaxUserTag); }

}  // namespace farandole::p2p
