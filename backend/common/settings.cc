#include "backend/common/settings.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

namespace farandole {
namespace {

int shiftOf(std::string_view unit) {
  if (unit.empty()) return 0;
  if (unit == "K" || unit == "k") return 10;
  if (unit == "M" || unit == "m") return 20;
  if (unit == "G" || unit == "g") return 30;
  return -1;
}

}  // namespace

std::string_view textSetting(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

Status refuseSetting(const char* name, std::string_view value, const std::string& expected) {
  return Status::invalidArgument(std::string(name) + " is '" + std::string(value) + "'; expected " + expected);
}

std::optional<std::uint64_t> parseBytes(std::string_view text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const int shift = shiftOf(text.substr(static_cast<std::size_t>(end - text.data())));
  if (error != std::errc() || shift < 0 || number > ~std::uint64_t{0} >> shift) return std::nullopt;
  return number << shift;
}

Result<std::uint64_t> byteSetting(const char* name, std::uint64_t fallback, std::uint64_t smallest,
                                  std::uint64_t largest) {
  const std::string_view value = textSetting(name);
  if (value.empty()) return fallback;
  const auto bytes = parseBytes(value);
  if (!bytes || *bytes < smallest || *bytes > largest) {
    return refuseSetting(name, value,
                         "a number of bytes from " + std::to_string(smallest) + " to " + std::to_string(largest) +
                             ", K, M or G may follow it");
  }
  return *bytes;
}

Result<std::string> choiceSetting(const char* name, std::string_view fallback,
                                  std::initializer_list<std::string_view> choices) {
  const std::string_view value = textSetting(name);
  if (value.empty()) return std::string(fallback);
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) return std::string(value);
  std::string expected;
  for (const std::string_view choice : choices) expected += (expected.empty() ? "" : " or ") + std::string(choice);
  return refuseSetting(name, value, expected);
}

}  // namespace farandole
