#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "backend/collective/communicator.h"
#include "backend/common/status.h"

namespace farandole::collective {

// Of two ranks that share a segment: from how many bytes for each on they swap faster by reading each other's memory
// than by passing it through their slots and windows (Topology::readsFrom). That is the machine's: a page costs the
// kernel 0.3 us on one and 0.8 on another. Measured here (some 0.5 ms where the machine is idle), unless one of the two
// knows, the first one before the other; both get the same. Topology::kNeverReads also where the machine was too busy
// to tell: not to be remembered.
//
// On both ranks, before the group's first operation; waits for the other one until `timeout`. Nothing held. `known`:
// what an earlier one has said, or kReadingUnknown.
inline constexpr std::size_t kReadingUnknown = 0;
Result<std::size_t> agreeOnReading(const std::shared_ptr<Communicator>& communicator, std::size_t known,
                                   std::chrono::milliseconds timeout);

}  // namespace farandole::collective
