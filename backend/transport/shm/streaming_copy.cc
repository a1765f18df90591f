#include "backend/transport/shm/streaming_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace farandole::transport {

#ifdef __SSE2__

void streamingCopy(void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  constexpr std::size_t kWord = sizeof(__m128i);
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  const auto copyPlain = [&](std::size_t count) {
    std::memcpy(target, source, count);
    target += count;
    source += count;
    bytes -= count;
  };
  copyPlain(std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine));
  for (; bytes >= kLine; bytes -= kLine, target += kLine, source += kLine) {
    for (std::size_t at = 0; at < kLine; at += kWord) {
      const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at));
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + at), word);
    }
  }
  _mm_sfence();  // before anybody is told
  copyPlain(bytes);
}

#else

void streamingCopy(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

#endif

}  // namespace farandole::transport
