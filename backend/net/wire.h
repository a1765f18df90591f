#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace farandole::net {

// Fields of a message, one after the other: integers little-endian, text with
// its length in front.
class WireWriter {
 public:
  template <typename T>
  WireWriter& number(T value) {
    static_assert(std::is_integral_v<T>);
    auto bits = static_cast<std::make_unsigned_t<T>>(value);
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      bytes_ += static_cast<char>(bits & 0xFF);
      if constexpr (sizeof(T) > 1) bits >>= 8;
    }
    return *this;
  }
  WireWriter& text(std::string_view value) {
    number(static_cast<std::uint32_t>(value.size()));
    bytes_ += value;
    return *this;
  }
  std::size_t size() const { return bytes_.size(); }
  std::string take() { return std::exchange(bytes_, {}); }

 private:
  std::string bytes_;
};

// Reads them back from bytes that nobody vouches for. Once a field was missing
// all that follows is zero or empty, and complete() is false.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : rest_(bytes) {}

  template <typename T>
  T number() {
    static_assert(std::is_integral_v<T>);
    if (!need(sizeof(T))) return 0;
    std::make_unsigned_t<T> bits = 0;
    for (std::size_t i = sizeof(T); i-- > 0;) {
      if constexpr (sizeof(T) > 1) bits <<= 8;
      bits |= static_cast<unsigned char>(rest_[i]);
    }
    rest_.remove_prefix(sizeof(T));
    return static_cast<T>(bits);
  }
  std::string_view text() {
    const auto size = number<std::uint32_t>();
    if (!need(size)) return {};
    const std::string_view value = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return value;
  }
  bool ok() const { return ok_; }
  bool complete() const { return ok_ && rest_.empty(); }

 private:
  bool need(std::size_t bytes) {
    if (bytes > rest_.size()) ok_ = false;
    return ok_;
  }

  std::string_view rest_;
  bool ok_ = true;
};

}  // namespace farandole::net
