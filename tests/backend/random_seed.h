#pragma once

#include <cstdint>
#include <iostream>
#include <random>

namespace farandole::testing {

// Another one for each run; printed, so that a failure can be had again.
inline std::uint64_t someSeed() {
  const std::uint64_t seed = std::random_device{}() % 1'000'000;
  std::cerr << "seed " << seed << '\n';
  return seed;
}

}  // namespace farandole::testing
