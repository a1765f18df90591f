#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/c10d/process_context.h"
#include "backend/collective/communicator.h"

namespace farandole::backend {

// Meets the other ranks of a group through the store: tells how this process is
// reached and reads how they are. `group` is this process's number for it. Waits
// for ranks that are late, up to `timeout`. `algorithms` must be the same on all.
Result<std::vector<collective::Member>> meetMembers(::c10d::Store& store, ProcessContext& context, int rank, int size,
                                                    std::uint32_t group, const std::string& algorithms,
                                                    std::chrono::milliseconds timeout);

}  // namespace farandole::backend
