#pragma once

#include <chrono>
#include <functional>

#include "backend/c10d/process_group.h"

namespace farandole::backend {

// Runs `body` on every rank of a group, each in a process of its own, and fails the
// test when one of them fails, or is not done after a minute: then it is killed.
// `dies` ends by SIGKILL. `enter` is called in the rank's process before the group is made.
void runRanks(int size, std::chrono::milliseconds timeout, const std::function<void(ProcessGroupFarandole&)>& body,
              int dies = -1, const std::function<void(int rank)>& enter = nullptr);

}  // namespace farandole::backend
