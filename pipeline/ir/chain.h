#pragma once

#include <cstdint>
#include <optional>

#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// The messages of a linear chain of stages: a forward passes its output to the
// next stage, an input backward its gradient to the stage before. A message is
// named by its send or by its receive.

// The other end: SEND_F of stage s <-> RECV_F of s + 1, SEND_B of s <-> RECV_B of s - 1.
Action counterpart(const Action& message);

// The rank at the other end of a send or receive. The stage at that end must exist.
std::int32_t peerRank(const Plan& plan, const Action& message);

// Whether the send or receive joins two stages that exist and lie on different ranks.
bool crossesRanks(const Plan& plan, const Action& message);

// The compute action (one that is not composite) whose result the action needs,
// on whatever rank it is; its kind is that of `action`. None at the ends of the chain.
std::optional<Action> producer(const Plan& plan, const Action& action);

// The send that hands on the result of a compute action, the receive that
// brings what it needs; none where both stages are on one rank.
std::optional<Action> sendAfter(const Plan& plan, const Action& action);
std::optional<Action> receiveBefore(const Plan& plan, const Action& action);

// Whether any action of the plan is a send, a receive or a batch of them.
bool hasCommunication(const Plan& plan);

}  // namespace farandole::pipeline
