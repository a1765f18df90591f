#include "backend/common/settings.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

namespace farandole {
namespace {

std::string_view valueOf(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

Status refuse(const char* name, std::string_view value, const std::string& expected) {
  return Status::invalidArgument(std::string(name) + " is '" + std::string(value) + "'; expected " + expected);
}

int shiftOf(std::string_view unit) {
  if (unit.empty()) return 0;
  if (unit == "K" || unit == "k") return 10;
  if (unit == "M" || unit == "m") return 20;
  if (unit == "G" || unit == "g") return 30;
  return -1;
}

}  // namespace

Result<std::uint64_t> byteSetting(const char* name, std::uint64_t fallback, std::uint64_t smallest,
                                  std::uint64_t largest) {
  const std::string_view value = valueOf(name);
  if (value.empty()) return fallback;
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  const int shift = shiftOf(value.substr(static_cast<std::size_t>(end - value.data())));
  if (error != std::errc() || shift < 0 || number > largest >> shift || number << shift < smallest) {
    return refuse(name, value,
                  "a number of bytes from " + std::to_string(smallest) + " to " + std::to_string(largest) +
                      ", K, M or G may follow it");
  }
  return number << shift;
}

Result<std::string> choiceSetting(const char* name, std::string_view fallback,
                                  std::initializer_list<std::string_view> choices) {
  const std::string_view value = valueOf(name);
  if (value.empty()) return std::string(fallback);
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) return std::string(value);
  std::string expected;
  for (const std::string_view choice : choices) expected += (expected.empty() ? "" : " or ") + std::string(choice);
  return refuse(name, value, expected);
}

}  // namespace farandole
