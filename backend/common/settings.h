#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "backend/common/status.h"

namespace farandole {

// The settings of a process are environment variables FARANDOLE_*. Each of these
// reads one: `fallback` where it is not set or empty, an error that names the
// variable, its value and what was expected where it cannot be understood.

// A number of bytes: "65536", "64K", "2M", "1G".
Result<std::uint64_t> byteSetting(const char* name, std::uint64_t fallback, std::uint64_t smallest,
                                  std::uint64_t largest);
// "65536", "64K" and so on in another text; none where it is no number of bytes.
std::optional<std::uint64_t> parseBytes(std::string_view text);
// What a setting of a richer syntax says, empty where it is not set; and the error where it cannot be understood.
std::string_view textSetting(const char* name);
Status refuseSetting(const char* name, std::string_view value, const std::string& expected);
// One of `choices`.
Result<std::string> choiceSetting(const char* name, std::string_view fallback,
                                  std::initializer_list<std::string_view> choices);

}  // namespace farandole
