#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace example {

// Joins this process to the others, as torchrun or the user's shell says in its environment: RANK, WORLD_SIZE,
// MASTER_ADDR and MASTER_PORT. Null where there are none: then it is the only one. Throws what is wrong.
c10::intrusive_ptr<c10d::Backend> joinOthers();

// What main() returns: of `run`, or 1 and its error on stderr.
int runAsMain(const char* program, int (*run)(int argc, char** argv), int argc, char** argv);

}  // namespace example
