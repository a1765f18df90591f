#include "backend/transport/shm/cache_lines.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace farandole::transport {
namespace {

TEST(CacheLines, WhatIsCopiedComesWholeBothWaysAndNothingElseIsTouched) {
  constexpr std::size_t kGuard = 64;
  constexpr std::byte kMark{0xee};
  std::mt19937 random(7);
  for (const std::size_t bytes : {0u, 1u, 63u, 64u, 65u, 1087u, 1088u, 1089u, 4096u, 100'001u}) {
    for (const std::size_t offset : {0u, 3u}) {
      SCOPED_TRACE(std::to_string(bytes) + " bytes from " + std::to_string(offset));
      std::vector<std::byte> from(bytes + 2 * kGuard + offset, kMark);
      std::vector<std::byte> to(bytes + 2 * kGuard, kMark);
      std::byte* const begin = from.data() + kGuard + offset;
      for (std::size_t i = 0; i < bytes; ++i) begin[i] = static_cast<std::byte>(random());
      const std::vector<std::byte> expected(begin, begin + bytes);
      copyAndClaim(to.data() + kGuard, begin, bytes);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), to.begin() + kGuard));
      for (std::size_t i = 0; i < kGuard; ++i) {
        ASSERT_EQ(to[i], kMark);
        ASSERT_EQ(to[to.size() - 1 - i], kMark);
        ASSERT_EQ(begin[-1 - static_cast<std::ptrdiff_t>(i)], kMark);
        ASSERT_EQ(begin[bytes + i], kMark);
      }
      // Every line was written to.
      for (std::size_t at = 0; at < bytes; at += 64) ASSERT_EQ(begin[at], std::byte{0});
      copyToClaimed(begin, to.data() + kGuard, bytes);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), begin));
      for (std::size_t i = 0; i < kGuard; ++i) {
        ASSERT_EQ(begin[-1 - static_cast<std::ptrdiff_t>(i)], kMark);
        ASSERT_EQ(begin[bytes + i], kMark);
      }
    }
  }
}

}  // namespace
}  // namespace farandole::transport
