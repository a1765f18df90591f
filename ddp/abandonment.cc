#include "ddp/abandonment.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "ddp/collectives.h"

namespace farandole::ddp {
namespace {

constexpr const char* kStoreKey = "farandole.ddp/abandoned";  // in the group's own store
constexpr std::chrono::milliseconds kLookInterval{200};

// Where abort does nothing, and a wait that runs out of time leaves the operation as it is.
bool mustLook(c10d::ProcessGroup& group, c10::DeviceType device) {
  return device == c10::kCPU && group.getSize() > 1 && isGloo(group, device);
}

}  // namespace

void abandonGroup(c10d::ProcessGroup& group, const std::string& why) {
  if (group.getSize() == 1) return;
  try {
    const auto store = group.getStore();
    if (store && abandonmentOf(group).empty()) store->set(kStoreKey, std::vector<std::uint8_t>(why.begin(), why.end()));
  } catch (const std::exception& error) {
    TORCH_WARN("farandole.ddp: the other ranks of the group will not learn why it was abandoned: ", error.what());
  }
  group.abort();
}

std::string abandonmentOf(c10d::ProcessGroup& group) {
  try {
    const auto store = group.getStore();
    if (!store || !store->check({kStoreKey})) return "";
    const std::vector<std::uint8_t> why = store->get(kStoreKey);
    return {why.begin(), why.end()};
  } catch (const std::exception&) {
    return "";  // the store is gone, too: the failure that led here says enough
  }
}

void leaveAbandoned(c10d::ProcessGroup& group, c10::DeviceType device) {
  if (device == c10::kCPU || group.getSize() == 1 || abandonmentOf(group).empty()) return;
  try {
    group.abort();
  } catch (const std::exception& error) {
    TORCH_WARN("farandole.ddp: the group that was abandoned cannot be aborted here: ", error.what());
  }
}

void await(c10d::ProcessGroup& group, c10::DeviceType device, c10d::Work& work) {
  if (!mustLook(group, device)) {
    work.wait();
    return;
  }
  while (true) {
    try {
      work.wait(kLookInterval);
      return;
    } catch (const std::exception&) {
      if (work.isCompleted()) {
        work.wait();  // throws where it was the work that failed, not the wait
        return;
      }
    }
    TORCH_CHECK(abandonmentOf(group).empty(), "a rank has given up the group");
  }
}

void await(c10d::ProcessGroup& group, c10::DeviceType device, c10::ivalue::Future& future) {
  if (!mustLook(group, device)) return;
  const auto done = std::make_shared<std::promise<void>>();
  future.addCallback([done](c10::ivalue::Future&) { done->set_value(); });
  const std::future<void> end = done->get_future();
  while (end.wait_for(kLookInterval) != std::future_status::ready) {
    TORCH_CHECK(abandonmentOf(group).empty(), "a rank has given up the group");
  }
}

}  // namespace farandole::ddp
