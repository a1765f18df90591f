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
// kind      keeps point-to-point messages apart from all others
// source    the sender's rank in the group
// element   what the message is made of; of collectives, a mark of those that its sender has called up to this one
//           (collective/call_history.h): not matched, but compared (see Transport)
// user tag  c10d's tag; of other kinds, where the first bit tells which: a collective's sequence number, and nothing
//           for what ranks tell each other of their edges between devices
enum class MessageKind : std::uint64_t { kPointToPoint, kCollective, kEdgeTalk };

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
inline constexpr std::uint32_t kMaxUserTag = (1u << kUserTagBits) - 1;
// A collective's number wraps around: among those that are in flight none is met twice.
inline constexpr std::uint32_t kEdgeTalkBit = 1u << (kUserTagBits - 1);
inline constexpr std::uint32_t kMaxSequence = kEdgeTalkBit - 1;

inline constexpr std::uint64_t kElementField = std::uint64_t{kMaxElement} << kElementShift;
inline constexpr std::uint64_t kSourceField = std::uint64_t{kMaxRanks - 1} << kSourceShift;

// What a receive wants to be equal: everything; all but the element; and all but the source, too.
inline constexpr std::uint64_t kExactMask = ~std::uint64_t{0};
inline constexpr std::uint64_t kAnyElementMask = ~kElementField;
inline constexpr std::uint64_t kAnySourceMask = ~(kElementField | kSourceField);
// What is sent to a group by whoever it is.
inline constexpr std::uint64_t kGroupMask = ~std::uint64_t{0} << kGroupShift;

// That of no point-to-point message.
inline constexpr std::uint64_t kNoTag = ~std::uint64_t{0};

constexpr std::uint32_t userField(MessageKind kind, std::uint32_t userTag) {
  switch (kind) {
    case MessageKind::kPointToPoint: return userTag & kMaxUserTag;
    case MessageKind::kCollective: return userTag & kMaxSequence;
    case MessageKind::kEdgeTalk: return kEdgeTalkBit;
  }
  return 0;
}

constexpr std::uint64_t groupTag(std::uint32_t group) { return std::uint64_t{group} << kGroupShift; }

constexpr std::uint64_t makeTag(std::uint32_t group, MessageKind kind, int source, std::uint32_t userTag,
                                std::uint32_t element = 0) {
  return groupTag(group) | std::uint64_t{kind != MessageKind::kPointToPoint} << kKindShift |
         std::uint64_t{static_cast<std::uint32_t>(source)} << kSourceShift | std::uint64_t{element} << kElementShift |
         userField(kind, userTag);
}

constexpr std::uint32_t groupOf(std::uint64_t tag) { return static_cast<std::uint32_t>(tag >> kGroupShift); }
constexpr bool isPointToPoint(std::uint64_t tag) { return (tag >> kKindShift & 1) == 0; }
constexpr int sourceOf(std::uint64_t tag) { return static_cast<int>((tag & kSourceField) >> kSourceShift); }
constexpr std::uint32_t elementOf(std::uint64_t tag) {
  return static_cast<std::uint32_t>((tag & kElementField) >> kElementShift);
}
constexpr std::uint32_t userTagOf(std::uint64_t tag) { return static_cast<std::uint32_t>(tag & kMaxUserTag); }

}  // namespace farandole::p2p
