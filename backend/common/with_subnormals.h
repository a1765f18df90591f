#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace farandole {

// While it lives this thread computes with subnormal numbers, whatever torch.set_flush_denormal() said in it: which
// thread of a process reduces depends on who waits, and the result must be the same bits on all ranks.
class WithSubnormals {
 public:
  WithSubnormals() : before_(read()) {
    if ((before_ & kFlushes) != 0) write(before_ & ~kFlushes);
  }
  ~WithSubnormals() {
    if ((before_ & kFlushes) != 0) write(before_);
  }
  WithSubnormals(const WithSubnormals&) = delete;
  WithSubnormals& operator=(const WithSubnormals&) = delete;

 private:
#if defined(__SSE__)
  using Mode = std::uint32_t;
  static constexpr Mode kFlushes = 0x8040;  // of results, of operands
  static Mode read() { return _mm_getcsr(); }
  static void write(Mode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  using Mode = std::uint64_t;
  static constexpr Mode kFlushes = (Mode{1} << 24) | (Mode{1} << 19);  // FZ, FZ16
  static Mode read() {
    Mode mode = 0;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(Mode mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  using Mode = std::uint32_t;  // nothing that torch could have set
  static constexpr Mode kFlushes = 0;
  static Mode read() { return 0; }
  static void write(Mode) {}
#endif

  const Mode before_;
};

}  // namespace farandole
