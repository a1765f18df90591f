#include "backend/common/text.h"

#include <gtest/gtest.h>

namespace farandole {
namespace {

TEST(CutTextTest, LeavesNoCharacterInHalf) {
  const std::string text = "a\u00e9\u20ac\U0001f600";  // of 1, 2, 3 and 4 bytes
  for (std::size_t most = 0; most <= text.size() + 1; ++most) {
    const std::size_t kept = most >= 10 ? 10 : most >= 6 ? 6 : most >= 3 ? 3 : most >= 1 ? 1 : 0;
    EXPECT_EQ(cutText(text, most), text.substr(0, kept)) << most;
  }
}

TEST(CutTextTest, IsBoundedWhereNoCharacterBegins) { EXPECT_EQ(cutText("\x80\x80\x80", 2), ""); }

TEST(HexTextTest, HasTwoDigitsForEachByte) {
  EXPECT_EQ(hexText(""), "");
  EXPECT_EQ(hexText(std::string_view("\0\x1f\xa0\xff", 4)), "001fa0ff");
}

}  // namespace
}  // namespace farandole
