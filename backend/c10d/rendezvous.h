#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/collective/communicator.h"

namespace farandole::backend {

// Publishes `self` in the store and reads what the other ranks published; waits
// for those that are late, up to `timeout`.
Result<std::vector<collective::Member>> exchangeMembers(::c10d::Store& store, int rank, int size,
                                                        const collective::Member& self,
                                                        std::chrono::milliseconds timeout);

}  // namespace farandole::backend
