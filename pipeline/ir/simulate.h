#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"
#include "pipeline/ir/transfer_times.h"

namespace farandole::pipeline {

// Seconds that each compute action of one stage takes.
struct StageCost {
  double forward = 0;
  double backward = 0;
  double backwardInput = 0;
  double backwardWeight = 0;
};

struct SimulationCosts {
  std::vector<StageCost> stages;  // one per stage
  TransferTimes transfer;
};

// Seconds that a compute action takes on a rank. Called once per compute
// action, and for an OVERLAP_F_B with the composite action.
using ActionCost = std::function<double(std::int32_t rank, const Action& action)>;

// Seconds from the beginning of the step. A post takes no time, a WAIT_SEND
// lasts until its sends are complete.
struct TimedAction {
  Action action;
  double start = 0;
  double end = 0;
};

struct RankTimeline {
  std::vector<TimedAction> actions;
  double busy = 0;                       // seconds of compute
  double bubble = 0;                     // 1 - busy / makespan
  std::int32_t peakLiveActivations = 0;  // most forwards at a time that no B or W had freed yet; 0 if forward-only
};

struct SimulationResult {
  double makespan = 0;                    // seconds
  std::optional<TransferTimes> transfer;  // none in a measured step
  std::vector<RankTimeline> ranks;

  // The mean over ranks.
  double bubble() const;
};

// When each action runs if every rank starts its actions in order and as early
// as it can: compute and communication are two streams, links do not contend,
// and a message arrives when it has been on its way for as long as `transfer`
// says, after both of its ends are posted.
// A compute action waits for the messages that it consumes, not for the batches
// that those are part of. In a plan without communication a dependency between
// ranks costs one transfer. Refuses a malformed or deadlocked plan, and a
// duration that is negative or not finite.
Result<SimulationResult> simulate(const Plan& plan, const ActionCost& cost, const TransferTimes& transfer);
Result<SimulationResult> simulate(const Plan& plan, const SimulationCosts& costs);

}  // namespace farandole::pipeline
