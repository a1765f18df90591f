#include "backend/p2p/message_tag.h"

#include <gtest/gtest.h>

#include <random>

namespace farandole::p2p {
namespace {

TEST(MessageTag, DifferentFieldsGiveDifferentTagsAndTheSourceCanBeReadBack) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 1000; ++i) {
    const auto group = static_cast<std::uint32_t>(random() % kMaxGroups);
    const int source = static_cast<int>(random() % kMaxRanks);
    const auto user = static_cast<std::uint32_t>(random() % kMaxUserTag);
    const auto element = static_cast<std::uint32_t>(random() % (kMaxElement + 1));
    const std::uint64_t tag = makeTag(group, MessageKind::kPointToPoint, source, user);
    const std::uint64_t typed = makeTag(group, MessageKind::kPointToPoint, source, user, element);
    EXPECT_EQ(sourceOf(typed), source);
    EXPECT_EQ(userTagOf(typed), user);
    EXPECT_EQ(elementOf(typed), element);
    EXPECT_EQ(elementOf(tag), 0u);
    EXPECT_EQ(tag & kAnyElementMask, typed & kAnyElementMask);
    EXPECT_NE(tag, makeTag(group, MessageKind::kCollective, source, user));
    EXPECT_NE(tag, makeTag((group + 1) % kMaxGroups, MessageKind::kPointToPoint, source, user));
    EXPECT_NE(tag, makeTag(group, MessageKind::kPointToPoint, source, user + 1));
    const std::uint64_t other = makeTag(group, MessageKind::kPointToPoint, (source + 1) % kMaxRanks, user);
    EXPECT_NE(tag, other);
    EXPECT_NE(typed & kAnyElementMask, other & kAnyElementMask);
    EXPECT_EQ(typed & kAnySourceMask, other & kAnySourceMask);
  }
}

TEST(MessageTag, ACollectivesNumberWrapsAroundBeforeItLooksLikeAnotherKind) {
  EXPECT_EQ(makeTag(0, MessageKind::kCollective, 0, kMaxSequence + 1), makeTag(0, MessageKind::kCollective, 0, 0));
  for (const std::uint32_t number : {0u, 1u, kMaxSequence, kEdgeTalkBit, kMaxUserTag}) {
    EXPECT_NE(makeTag(3, MessageKind::kCollective, 2, number), makeTag(3, MessageKind::kEdgeTalk, 2, 0));
    EXPECT_NE(makeTag(3, MessageKind::kPointToPoint, 2, number), makeTag(3, MessageKind::kEdgeTalk, 2, 0));
  }
  EXPECT_EQ(sourceOf(makeTag(3, MessageKind::kEdgeTalk, 2, 0)), 2);
}

}  // namespace
}  // namespace farandole::p2p
