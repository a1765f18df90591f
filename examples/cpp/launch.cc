#include "examples/cpp/launch.h"

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "backend/c10d/process_group.h"

namespace example {

namespace {

constexpr std::chrono::seconds kTimeout{60};  // of meeting, and of each operation

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  TORCH_CHECK_VALUE(value != nullptr, name, " is not set, expected RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
  return value;
}

int number(const char* name, int most) {
  const std::string text = variable(name);
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TORCH_CHECK_VALUE(error == std::errc() && end == text.data() + text.size() && value >= 0 && value <= most, name,
                    " is '", text, "', expected 0 to ", most);
  return value;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> joinOthers() {
  if (std::getenv("RANK") == nullptr && std::getenv("WORLD_SIZE") == nullptr) return nullptr;
  const int size = number("WORLD_SIZE", 1 << 15);
  const int rank = number("RANK", size - 1);
  // torchrun may serve the store itself.
  const char* served = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(number("MASTER_PORT", 65535));
  options.isServer = rank == 0 && (served == nullptr || std::string(served) != "True");
  options.timeout = kTimeout;
  const auto store = c10::make_intrusive<c10d::TCPStore>(variable("MASTER_ADDR"), options);
  using farandole::backend::ProcessGroupFarandole;
  const c10::intrusive_ptr<c10d::Backend> backend = c10::make_intrusive<ProcessGroupFarandole>(
      store, rank, size, c10::make_intrusive<ProcessGroupFarandole::Options>(kTimeout));
  backend->barrier()->wait();  // the store may be rank 0's: it must not end before the others have met
  return backend;
}

int runAsMain(const char* program, int (*run)(int argc, char** argv), int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());
  }
  return 1;
}

}  // namespace example
