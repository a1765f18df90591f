#pragma once

#include <cstddef>
#include <cstring>

namespace farandole::transport {

inline constexpr std::size_t kCacheLine = 64;

// How far ahead a copy asks for lines that it writes to.
inline constexpr std::size_t kAskedAhead = 1024;
inline void askToWrite(std::byte* line) {
  constexpr int kToWrite = 1;
  __builtin_prefetch(line, kToWrite);
}

// By the only reader of shared memory, when it has read what was there and the writer will write again: overwrites it
// in part, so that its cache lines are the reader's own. A writer takes lines over from a core that has written them
// many at a time; from one that has only read them it takes one after the other, on some machines for as long as a
// meeting of the two takes.
//
// Measured on Zen 4 with two bare threads: 32 KiB, written by one and read by the other, both ways at once, each into
// the buffer of the time before. Cores that share a cache 4.8 us, after this 2.1; cores that do not 17.8 and 5.6.
inline void claimLines(std::byte* data, std::size_t bytes) {
  volatile std::byte* const lines = data;
  for (std::size_t at = 0; at < bytes; at += kCacheLine) lines[at] = std::byte{0};
}

// Both at once, of what does not overlap: a line that was just read is claimed for next to nothing, above all when it
// was asked for with that aim (two bare threads on cores that share a cache, 128 KiB passed each way and as much copied
// locally: in two passes 5.55 us, in one 5.37, asked for ahead 4.8; 32 KiB 1.46, 1.46, 1.31).
inline void copyAndClaim(void* to, std::byte* from, std::size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  const auto copyLine = [&] {
    std::memcpy(target, from, kCacheLine);
    *static_cast<volatile std::byte*>(from) = std::byte{0};
    target += kCacheLine;
    from += kCacheLine;
    bytes -= kCacheLine;
  };
  while (bytes >= kAskedAhead + kCacheLine) {
    askToWrite(from + kAskedAhead);
    copyLine();
  }
  while (bytes >= kCacheLine) copyLine();
  if (bytes == 0) return;
  std::memcpy(target, from, bytes);
  *static_cast<volatile std::byte*>(from) = std::byte{0};
}

// By the writer of shared memory that its only reader claims: asks for the lines back ahead of the copy, which does not
// overlap. Where nobody has claimed them it takes longer than a plain copy does.
//
// Measured on a Xeon with 2 MiB of second-level cache for each core, two bare processes, 32 KiB each way at once, of
// which a meeting takes 0.9 us: 6.2 us where a memcpy writes them, 5.1 here; lines that are not claimed 5.6 and 9.9.
inline void copyToClaimed(std::byte* to, const void* from, std::size_t bytes) {
  const auto* source = static_cast<const std::byte*>(from);
  for (; bytes >= kAskedAhead + kCacheLine; bytes -= kCacheLine, to += kCacheLine, source += kCacheLine) {
    askToWrite(to + kAskedAhead);
    std::memcpy(to, source, kCacheLine);
  }
  std::memcpy(to, source, bytes);
}

}  // namespace farandole::transport
