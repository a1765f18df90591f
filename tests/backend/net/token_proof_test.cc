#include "backend/net/token_proof.h"

#include <gtest/gtest.h>

namespace farandole::net {
namespace {

std::string hex(const std::array<std::uint8_t, 16>& digest) {
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

TEST(SipHash, AgreesWithTheVectorsOfItsAuthors) {
  const SipKey key = {0x0706050403020100, 0x0f0e0d0c0b0a0908};
  EXPECT_EQ(hex(sipHash128(key, "")), "a3817f04ba25a8e66df67214c7550293");
  EXPECT_EQ(hex(sipHash128(key, std::string_view("\0", 1))), "da87c1d86b99af44347659119b22fc45");
}

TEST(Proof, ChangesWithEveryBitOfTokenAndMessage) {
  const std::string token = "0123456789abcdef0123456789abcdef";
  const std::string message = "message";
  const std::string proof = proofOf(token, message);
  EXPECT_EQ(proof.size(), 16U);
  EXPECT_EQ(proof, proofOf(token, message));
  for (std::size_t bit = 0; bit < token.size() * 8; ++bit) {
    std::string other = token;
    other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << bit % 8));
    EXPECT_NE(proofOf(other, message), proof);
  }
  for (std::size_t bit = 0; bit < message.size() * 8; ++bit) {
    std::string other = message;
    other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << bit % 8));
    EXPECT_NE(proofOf(token, other), proof);
  }
}

TEST(Proof, IsComparedInFull) {
  EXPECT_TRUE(equalInConstantTime("abc", "abc"));
  EXPECT_FALSE(equalInConstantTime("abc", "abd"));
  EXPECT_FALSE(equalInConstantTime("xbc", "abc"));
  EXPECT_FALSE(equalInConstantTime("abc", "ab"));
  EXPECT_TRUE(equalInConstantTime("", ""));
}

}  // namespace
}  // namespace farandole::net
