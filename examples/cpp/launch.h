#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace example {

// Joins this process to the others, as torchrun or the user's shell says in its environment: RANK, WORLD_SIZE,
// MASTER_ADDR and MASTER_PORT. Null where there are none: then it is the only one. Throws what is wrong.
c10::intrusive_ptr<c10d::Backend> joinOthers();

}  // namespace example
