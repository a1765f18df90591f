#include "backend/common/digest.h"

#include <gtest/gtest.h>

namespace farandole {
namespace {

std::uint64_t digestOf(std::string_view bytes) {
  Digest digest;
  digest.add(bytes);
  return digest.value();
}

// From the authors' list of test vectors.
TEST(DigestTest, IsFnv1a) {
  EXPECT_EQ(digestOf(""), 0xcbf29ce484222325ull);
  EXPECT_EQ(digestOf("a"), 0xaf63dc4c8601ec8cull);
  EXPECT_EQ(digestOf("foobar"), 0x85944171f73967e8ull);
}

TEST(DigestTest, TakesNumbersByteByByteFromTheLowest) {
  Digest digest;
  digest.add(std::int64_t{0x0102030405060708});
  EXPECT_EQ(digest.value(), digestOf("\x08\x07\x06\x05\x04\x03\x02\x01"));
}

}  // namespace
}  // namespace farandole
