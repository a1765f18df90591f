#pragma once

#include <chrono>
#include <functional>

namespace farandole::backend {

// Runs `task` on a thread that may block for as long as it likes. What users
// chain to a future may wait for another future (torch's PowerSGD does), which
// neither the event loop's thread nor one that progresses the transport may.
//
// A thread is made when none is idle, and ends when it had nothing to do for a
// while. Any thread; what the task throws is logged.
void runOnCallbackThread(std::function<void()> task);

// The same for what the end of the process waits for.
void runBeforeExit(std::function<void()> task);
// Blocks until all of these have run; false when the time is over first.
bool waitBeforeExit(std::chrono::milliseconds timeout);

}  // namespace farandole::backend
