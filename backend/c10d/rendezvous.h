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

// Meets the other ranks of a group through the store: tells how this process is
// reached and reads how they are. `group` is this process's number for it. Waits
// for ranks that are late, up to `timeout`. `algorithms` must be the same on all.
Result<Meeting> meetMembers(::c10d::Store& store, ProcessContext& context, int rank, int size, std::uint32_t group,
                            const std::string& algorithms, std::chrono::milliseconds timeout);

}  // namespace farandole::backend
