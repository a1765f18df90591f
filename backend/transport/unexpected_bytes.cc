#include "backend/transport/unexpected_bytes.h"

#include "backend/common/settings.h"

namespace farandole::transport {
namespace {

constexpr std::size_t kLeast = 64 << 10;
constexpr std::size_t kMost = std::size_t{1} << 40;

}  // namespace

Result<std::size_t> unexpectedBytesSetting() {
  const auto bytes = byteSetting("FARANDOLE_UNEXPECTED_BYTES", kUnexpectedBytes, kLeast, kMost);
  if (!bytes) return bytes.status();
  return static_cast<std::size_t>(*bytes);
}

}  // namespace farandole::transport
