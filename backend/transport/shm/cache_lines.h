#pragma once

#include <cstddef>

namespace farandole::transport {

// By the only reader of shared memory, when it has read what was there and the writer will write again: overwrites it
// in part, so that its cache lines are the reader's own. A writer takes lines over from a core that has written them
// many at a time; from one that has only read them it takes one after the other, on some machines for as long as a
// meeting of the two takes.
//
// Measured on Zen 4 with two bare threads: 32 KiB, written by one and read by the other, both ways at once, each into
// the buffer of the time before. Cores that share a cache 4.8 us, after this 2.1; cores that do not 17.8 and 5.6.
inline void claimLines(std::byte* data, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  volatile std::byte* const lines = data;
  for (std::size_t at = 0; at < bytes; at += kLine) lines[at] = std::byte{0};
}

}  // namespace farandole::transport
