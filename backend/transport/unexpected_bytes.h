#pragma once

#include <cstddef>

#include "backend/common/status.h"

namespace farandole::transport {

// How much of one peer's messages a process keeps that have come before their receives. What its sender sends beyond
// that is done when it is received, as a large message is; it is sent nevertheless, for the receive that is posted next
// may be for it.
inline constexpr std::size_t kUnexpectedBytes = 32 << 20;

// FARANDOLE_UNEXPECTED_BYTES.
Result<std::size_t> unexpectedBytesSetting();

}  // namespace farandole::transport
