#include "tests/backend/transport/nccl/simulator/core.h"

#include <atomic>

namespace farandole::testing {
namespace {

std::uint64_t nextSerial() {
  static std::atomic<std::uint64_t> serial{0};
  return ++serial;
}

}  // namespace

Core::Core(int numDevices, std::uint64_t seed)
    : serial(nextSerial()), random(seed), killed(static_cast<std::size_t>(numDevices)) {}

void Core::violation(const std::string& function, const std::string& text) {
  violations.push_back(function + ": " + text);
}

void Core::changed() {
  hosts.notify_all();
  executor.notify_one();
}

}  // namespace farandole::testing
