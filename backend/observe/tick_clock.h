#pragma once

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace farandole::observe {

// A clock that is cheap to read: the processor's counter where it runs at one
// speed for ever (10 ns where steady_clock takes 23), else steady_clock. How long
// a tick is shows in the distance to a second look at both clocks. Any thread.
class TickClock {
 public:
  using Ticks = std::uint64_t;

 private:
  // Both clocks at one moment.
  struct Look {
    Ticks ticks;
    std::uint64_t steady;  // nanoseconds, as is `wall`
    std::int64_t wall;
  };

 public:
  TickClock() : start_(look()) {}

  Ticks now() const {
#if defined(__x86_64__)
    if (hasCounter_) return __rdtsc();
#endif
    return steadyNow();
  }

  // Turns ticks of the past into nanoseconds since the epoch.
  class Converter {
   public:
    explicit Converter(const TickClock& clock)
        : now_(clock.look()),
          nanosPerTick_(now_.ticks > clock.start_.ticks ? static_cast<double>(now_.steady - clock.start_.steady) /
                                                              static_cast<double>(now_.ticks - clock.start_.ticks)
                                                        : 1) {}
    std::int64_t operator()(Ticks ticks) const {
      const auto ago = static_cast<std::int64_t>(now_.ticks - ticks);
      return now_.wall - static_cast<std::int64_t>(static_cast<double>(ago) * nanosPerTick_);
    }

   private:
    Look now_;
    double nanosPerTick_;
  };

 private:
  static std::uint64_t steadyNow() {
    return static_cast<std::uint64_t>(
        std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
  }
  static bool detectCounter() {
#if defined(__x86_64__)
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    constexpr unsigned kPowerLeaf = 0x80000007;
    constexpr unsigned kInvariant = 1U << 8;
    return __get_cpuid(kPowerLeaf, &a, &b, &c, &d) != 0 && (d & kInvariant) != 0;
#else
    return false;
#endif
  }
  Look look() const {
    const auto wall = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
    return {now(), steadyNow(), wall};
  }

  const bool hasCounter_ = detectCounter();
  const Look start_;
};

}  // namespace farandole::observe
