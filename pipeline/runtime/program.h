#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

enum class InstructionOp : std::uint8_t { kForward, kBackward, kBackwardInput, kBackwardWeight, kPost, kWaitSend };

constexpr bool isCompute(InstructionOp op) { return op != InstructionOp::kPost && op != InstructionOp::kWaitSend; }

// One instruction of a rank. `stage` counts the rank's own stages from 0.
struct Instruction {
  InstructionOp op = InstructionOp::kForward;
  bool lastBackward = false;       // of B and W: the stage's gradients are complete after it
  bool lastInputBackward = false;  // of B and I: no gradient of the stage's inputs is left after it
  bool activation = true;          // of kWaitSend: waits for SEND_F
  bool gradient = true;            // of kWaitSend: waits for SEND_B
  std::int32_t stage = 0;
  std::int32_t microbatch = 0;
  std::int32_t peer = 0;            // of kPost
  std::uint32_t firstTransfer = 0;  // of kPost: a range of Program::transfers
  std::uint32_t numTransfers = 0;
  std::uint32_t firstArrived = 0;  // of kForward: a range of Program::arrived
  std::uint32_t numArrived = 0;
};

// One edge of one microbatch: a send or receive of all its tensors.
struct TransferRef {
  ActionKind kind = ActionKind::kSendF;  // kSendF, kRecvF, kSendB or kRecvB
  std::int32_t stage = 0;                // as in Instruction
  std::int32_t microbatch = 0;
  std::int32_t link = 0;  // of the stage's outOf for kSendF and kRecvB, of its into for the others
};

// A gradient that a stage has sent over one of its into.
struct SentGradient {
  std::int32_t microbatch = 0;
  std::int32_t link = 0;
};

// An edge of the graph of stages, as one of its two stages sees it.
struct StageLink {
  static constexpr std::int32_t kElsewhere = -1;

  std::int32_t edge = 0;            // its number in the graph
  std::int32_t other = 0;           // the stage at the other end
  std::int32_t rank = 0;            // where that one lives
  std::int32_t local = kElsewhere;  // as in Instruction, where that is here
  std::int32_t place = 0;           // the link's place in that one's list

  bool isLocal() const { return local != kElsewhere; }
};

// One of the rank's stages. Links are in the order of the stages at their other ends.
struct ProgramStage {
  std::int32_t index = 0;
  bool splitsBackward = false;  // I and W of it are apart, of any microbatch
  std::vector<StageLink> into, outOf;
};

// A lowered plan, compiled for one rank: flat arrays that the executor replays.
struct Program {
  // The ranks that this one sends to, and receives from; ascending.
  std::vector<int> peers() const;

  std::int32_t rank = 0;
  std::int32_t numMicrobatches = 0;
  bool hasBackward = false;
  std::vector<ProgramStage> stages;  // the rank's, ascending
  std::vector<Instruction> instructions;
  std::vector<TransferRef> transfers;
  std::vector<SentGradient> arrived;  // when a forward has its inputs, whose sender had these before
  std::vector<std::string> labels;    // [instructions] the action's text
  std::uint64_t digest = 0;           // of the whole plan: equal on all ranks
};

// Errors name the action that cannot be run.
Result<Program> compileProgram(const Plan& plan, int rank);

}  // namespace farandole::pipeline
