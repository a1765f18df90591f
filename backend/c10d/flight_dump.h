#pragma once

#include <string>

#include "backend/observe/flight_recorder.h"

namespace farandole::backend {

// A snapshot as torch.distributed.flight_recorder reads it: a pickled dict.
// `onlyActive`: without what has completed.
std::string pickleSnapshot(const observe::FlightSnapshot& snapshot, bool onlyActive);

}  // namespace farandole::backend
