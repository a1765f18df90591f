#include "backend/common/settings.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace farandole {
namespace {

constexpr const char* kName = "FARANDOLE_TEST_SETTING";

class Settings : public testing::Test {
 protected:
  static void set(const char* value) { setenv(kName, value, 1); }
  void TearDown() override { unsetenv(kName); }
  static Result<std::uint64_t> bytes() { return byteSetting(kName, 7, 4, 4096); }
};

TEST_F(Settings, AreTheirDefaultWhereNothingIsSet) {
  EXPECT_EQ(*bytes(), 7u);
  EXPECT_EQ(*choiceSetting(kName, "auto", {"auto", "off"}), "auto");
  set("");
  EXPECT_EQ(*bytes(), 7u);
}

TEST_F(Settings, OfBytesTakeUnits) {
  set("512");
  EXPECT_EQ(*bytes(), 512u);
  set("3K");
  EXPECT_EQ(*bytes(), 3072u);
  set("1G");
  EXPECT_EQ(*byteSetting(kName, 0, 0, std::uint64_t{1} << 40), std::uint64_t{1} << 30);
}

TEST_F(Settings, ThatAreWrongAreRefusedByNameValueAndExpectation) {
  for (const char* value : {"3", "5K", "4097", "-1", "x", "12q", "1KB", "99999999999999999999", " 8", "0x10"}) {
    set(value);
    const auto result = bytes();
    ASSERT_FALSE(result) << value;
    EXPECT_NE(result.status().toString().find("FARANDOLE_TEST_SETTING is '" + std::string(value) + "'; expected"),
              std::string::npos);
  }
  set("on");
  EXPECT_EQ(choiceSetting(kName, "auto", {"auto", "off"}).status().toString(),
            "FARANDOLE_TEST_SETTING is 'on'; expected auto or off");
}

}  // namespace
}  // namespace farandole
