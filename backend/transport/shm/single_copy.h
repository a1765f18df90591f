#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "backend/common/status.h"

namespace farandole::transport {

// Copies out of another process of the host, with no memory in between (process_vm_readv).
Status copyFromProcess(pid_t pid, std::byte* to, const std::byte* from, std::size_t bytes);

inline std::uint64_t wordOf(const std::byte* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// What trying to read kProbeBytes there has shown. Takes some 30 us.
inline constexpr std::size_t kProbeBytes = 64 << 10;
struct ReadingTrial {
  std::optional<std::uint64_t> firstWord;  // none: it cannot be read
  bool isCheap = false;
};
ReadingTrial tryToRead(pid_t pid, const std::byte* from);

}  // namespace farandole::transport
