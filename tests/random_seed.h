#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace farandole::testing {

// FARANDOLE_TEST_SEED from the environment, or another one for each run; printed, so that a failure can be had again.
inline std::uint64_t someSeed() {
  const char* const given = std::getenv("FARANDOLE_TEST_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}() % 1'000'000;
  std::cerr << "FARANDOLE_TEST_SEED=" << seed << '\n';
  return seed;
}

}  // namespace farandole::testing
