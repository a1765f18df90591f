#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/ir/simulate.h"

namespace farandole::pipeline {

// A message on its way, in seconds from the beginning of the step.
struct TimedMessage {
  Action receive;  // names it
  std::int32_t sender = 0;
  std::int32_t receiver = 0;
  double sent = 0;  // its send is posted
  double arrived = 0;
};

// The messages of a simulated step whose plan has communication, in the order in which the senders post them, rank by
// rank. None of a measured step, which does not tell when a message arrived.
std::vector<TimedMessage> timedMessages(const SimulationResult& step);

}  // namespace farandole::pipeline
