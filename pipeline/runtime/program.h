#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

enum class StepOp : std::uint8_t { kForward, kBackward, kBackwardInput, kBackwardWeight, kPost, kWaitSend };

constexpr bool isCompute(StepOp op) { return op != StepOp::kPost && op != StepOp::kWaitSend; }

// One instruction of a rank. `stage` counts the rank's own stages from 0.
struct Step {
  StepOp op = StepOp::kForward;
  bool lastBackward = false;       // of B and W: the stage's gradients are complete after it
  bool lastInputBackward = false;  // of B and I: no gradient of the stage's inputs is left after it
  bool activation = true;          // of kWaitSend: waits for SEND_F
  bool gradient = true;            // of kWaitSend: waits for SEND_B
  std::int32_t stage = 0;
  std::int32_t microbatch = 0;
  std::int32_t peer = 0;            // of kPost
  std::uint32_t firstTransfer = 0;  // of kPost: a range of Program::transfers
  std::uint32_t numTransfers = 0;
};

// One edge of one microbatch: a send or receive of all its tensors.
struct TransferRef {
  ActionKind kind = ActionKind::kSendF;  // kSendF, kRecvF, kSendB or kRecvB
  std::int32_t stage = 0;                // as in Step
  std::int32_t microbatch = 0;
};

// A lowered plan, compiled for one rank: flat arrays that the executor replays.
struct Program {
  std::int32_t rank = 0;
  std::int32_t numStages = 0;
  std::int32_t numMicrobatches = 0;
  bool hasBackward = false;
  std::vector<std::int32_t> rankOfStage;
  std::vector<std::int32_t> stages;  // the rank's stages, ascending
  std::vector<bool> splitsBackward;  // [stages] whether I and W of the stage are apart, of any microbatch
  std::vector<Step> steps;
  std::vector<TransferRef> transfers;
  std::vector<std::string> labels;  // [steps] the action's text
  std::uint64_t digest = 0;         // of the whole plan: equal on all ranks
};

// Errors name the action that cannot be run.
Result<Program> compileProgram(const Plan& plan, int rank);

}  // namespace farandole::pipeline
