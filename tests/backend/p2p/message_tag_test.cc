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
    const auto user = static_cast<std::uint32_t>(random());
    const std::uint64_t tag = makeTag(group, MessageKind::kPointToPoint, source, user);
    EXPECT_EQ(sourceOf(tag), source);
    EXPECT_NE(tag, makeTag(group, MessageKind::kCollective, source, user));
    EXPECT_NE(tag, makeTag((group + 1) % kMaxGroups, MessageKind::kPointToPoint, source, user));
    EXPECT_NE(tag, makeTag(group, MessageKind::kPointToPoint, source, user + 1));
    const std::uint64_t other = makeTag(group, MessageKind::kPointToPoint, (source + 1) % kMaxRanks, user);
    EXPECT_NE(tag, other);
    EXPECT_EQ(tag & kAnySourceMask, other & kAnySourceMask);
  }
}

}  // namespace
}  // namespace farandole::p2p
