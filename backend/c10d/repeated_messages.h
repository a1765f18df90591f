#pragma once

#include <chrono>
#include <memory>

#include "backend/c10d/call_counts.h"
#include "backend/c10d/flight_log.h"
#include "backend/c10d/process_context.h"
#include "backend/collective/communicator.h"
#include "backend/common/repeated_message.h"

namespace farandole::backend {

// The messages of a group that are repeated: see RepeatedMessage. Each is one
// operation that is started again and again, and that the communicator ends like
// any other: by timeouts, aborts, deaths. `flight`: of the communicator's group, or null.
Result<std::unique_ptr<RepeatedMessage>> makeRepeatedMessage(std::shared_ptr<ProcessContext> context,
                                                             std::shared_ptr<collective::Communicator> communicator,
                                                             std::shared_ptr<CallCounts> counts,
                                                             const GroupFlight* flight,
                                                             std::chrono::milliseconds timeout,
                                                             const RepeatedMessageSpec& spec);

}  // namespace farandole::backend
