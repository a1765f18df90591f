#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/common/status.h"

namespace farandole::backend {

// Ranks that wait for each other in a store without being stuck in it, for who waits in the store cannot be told that
// the group is over. Throws what the store throws.
class StoreGathering {
 public:
  // Of `size` ranks, under this key, once. `health`: ok, or why nobody will come any more.
  StoreGathering(::c10d::Store& store, std::string key, int size) : store_(store), key_(std::move(key)), size_(size) {}

  // Blocks until all have come. An error says how many came by the deadline, or why the group is over.
  Status await(std::chrono::steady_clock::time_point deadline, const std::function<Status()>& health);
  // The same; whether all of them said the same.
  Result<bool> agree(const std::string& mine, std::chrono::steady_clock::time_point deadline,
                     const std::function<Status()>& health);

 private:
  ::c10d::Store& store_;
  const std::string key_;
  const int size_;
};

}  // namespace farandole::backend
