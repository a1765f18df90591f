#include "ddp/hook_failure.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "ddp/abandonment.h"

namespace farandole::ddp {
namespace {

constexpr std::chrono::seconds kPatience{3};
constexpr std::chrono::milliseconds kLookInterval{5};

std::string keyOf(std::int64_t times, int rank) {
  return "farandole.ddp/hook_failed/" + std::to_string(times) + "/" + std::to_string(rank);
}

std::string firstLineOf(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

std::string HookFailure::describe() const {
  std::string why = "it raised";
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& error) {
    why = firstLineOf(error);
  } catch (...) {  // NOLINT(bugprone-empty-catch): nothing tells what it was
  }
  return "its communication hook failed for bucket " + std::to_string(bucket) + ": " + why;
}

bool haveAllFailed(c10d::ProcessGroup& group, int bucket) {
  if (group.getSize() == 1) return true;
  try {
    const auto store = group.getStore();
    if (!store) return false;
    const std::string mine = std::to_string(bucket);
    const std::int64_t times = store->add(keyOf(0, group.getRank()) + "/times", 1);
    store->set(keyOf(times, group.getRank()), std::vector<std::uint8_t>(mine.begin(), mine.end()));
    std::vector<std::string> keys;
    for (int rank = 0; rank < group.getSize(); ++rank) keys.push_back(keyOf(times, rank));
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (!store->check(keys)) {
      if (std::chrono::steady_clock::now() > end || !abandonmentOf(group).empty()) return false;
      std::this_thread::sleep_for(kLookInterval);
    }
    for (const std::string& key : keys) {
      const std::vector<std::uint8_t> theirs = store->get(key);
      if (std::string(theirs.begin(), theirs.end()) != mine) return false;
    }
    return true;
  } catch (const std::exception&) {
    return false;  // the store is gone, and its process
  }
}

}  // namespace farandole::ddp
