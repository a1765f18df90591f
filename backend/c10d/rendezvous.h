#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/c10d/process_context.h"
#include "backend/collective/communicator.h"
#include "backend/net/control_plane.h"

namespace farandole::backend {

// How the ranks of a group reach each other.
struct Meeting {
  std::vector<collective::Member> members;
  // Of a group that spans hosts: its control plane, and what its members alone know, new with each group.
  std::vector<net::ControlMember> controls;
  std::string token;
};

// What must be the same on all ranks of a group.
struct CommonSettings {
  std::string algorithms;    // AlgorithmTable::overrides()
  std::string cudaMessages;  // FARANDOLE_CUDA_MESSAGES
};

// Meets the other ranks of a group through the store: tells how this process is
// reached and reads how they are. `group` is this process's number for it. Waits
// for ranks that are late, up to `timeout`.
Result<Meeting> meetMembers(::c10d::Store& store, ProcessContext& context, int rank, int size, std::uint32_t group,
                            const CommonSettings& settings, std::chrono::milliseconds timeout);

// What all ranks tell, by rank; `mine` is this one's. `name`: of what is told, once in a group.
Result<std::vector<std::string>> exchange(::c10d::Store& store, const std::string& name, int rank, int size,
                                          const std::string& mine, std::chrono::milliseconds timeout);

}  // namespace farandole::backend
