#pragma once

#include <cstdint>
#include <initializer_list>
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
// One of `choices`.
Result<std::string> choiceSetting(const char* name, std::string_view fallback,
                                  std::initializer_list<std::string_view> choices);

}  // namespace farandole
