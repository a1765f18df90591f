#include "pipeline/runtime/program.h"

#include <gtest/gtest.h>

#include <set>

#include "pipeline/passes/lower.h"
#include "pipeline/runtime/message_tag.h"
#include "pipeline/schedules/registry.h"

namespace farandole::pipeline {
namespace {

Plan lowered(std::string_view name, int ranks, int microbatches) {
  return *lower(*makePlan(name, {ranks, ranks, microbatches, false}));
}

TEST(Program, KeepsEveryActionOfTheRankInOrder) {
  const Plan plan = lowered("1F1B", 3, 5);
  for (int rank = 0; rank < 3; ++rank) {
    const Result<Program> program = compileProgram(plan, rank);
    ASSERT_TRUE(program) << program.status().toString();
    ASSERT_EQ(program.value().instructions.size(), plan.ranks[rank].size());
    std::size_t transfers = 0;
    for (std::size_t i = 0; i < plan.ranks[rank].size(); ++i) {
      const Action& action = plan.ranks[rank][i];
      const Instruction& instruction = program.value().instructions[i];
      EXPECT_EQ(instruction.op == InstructionOp::kForward, action.kind == ActionKind::kForward);
      EXPECT_EQ(instruction.op == InstructionOp::kBackward, action.kind == ActionKind::kBackward);
      if (instruction.op == InstructionOp::kPost) {
        EXPECT_EQ(instruction.firstTransfer, transfers);
        transfers += instruction.numTransfers;
        EXPECT_EQ(instruction.numTransfers, std::max<std::size_t>(1, action.parts.size()));
        EXPECT_TRUE(instruction.peer == rank - 1 || instruction.peer == rank + 1);
      } else {
        EXPECT_EQ(instruction.microbatch, action.microbatch);
      }
    }
    EXPECT_EQ(program.value().transfers.size(), transfers);
  }
}

TEST(Program, MarksTheLastBackwardOfEachStageOnly) {
  const Program program = *compileProgram(lowered("GPipe", 2, 4), 1);
  int marked = 0;
  for (const Instruction& instruction : program.instructions) {
    if (!instruction.lastBackward) continue;
    ++marked;
    EXPECT_EQ(instruction.op, InstructionOp::kBackward);
    EXPECT_EQ(instruction.microbatch, 3);
  }
  EXPECT_EQ(marked, 1);
}

TEST(Program, TellsWhichGradientsHaveArrivedWhenAForwardHasItsInputs) {
  // Rank 0 computes F0 F1 B0 F2 B1 F3 B2 F4 ...: it sends F2 when it has B0's gradient.
  const Program program = *compileProgram(lowered("1F1B", 2, 5), 1);
  for (const Instruction& instruction : program.instructions) {
    const std::uint32_t expected = instruction.op == InstructionOp::kForward && instruction.microbatch >= 2 ? 1 : 0;
    ASSERT_EQ(instruction.numArrived, expected) << instruction.microbatch;
    if (expected == 0) continue;
    EXPECT_EQ(program.arrived[instruction.firstArrived].microbatch, instruction.microbatch - 2);
    EXPECT_EQ(program.arrived[instruction.firstArrived].link, 0);
  }
  EXPECT_TRUE(compileProgram(lowered("1F1B", 2, 5), 0)->arrived.empty());
  EXPECT_TRUE(compileProgram(lowered("GPipe", 2, 5), 1)->arrived.empty());
}

TEST(Program, DigestIsEqualOnAllRanksAndTellsPlansApart) {
  std::set<std::uint64_t> digests;
  for (int microbatches = 1; microbatches <= 4; ++microbatches) {
    const Plan plan = lowered("1F1B", 2, microbatches);
    const std::uint64_t digest = compileProgram(plan, 0).value().digest;
    EXPECT_EQ(digest, compileProgram(plan, 1).value().digest);
    digests.insert(digest);
  }
  digests.insert(compileProgram(lowered("GPipe", 2, 4), 0).value().digest);
  EXPECT_EQ(digests.size(), 5u);
}

TEST(Program, RefusesWhatItCannotRunByName) {
  Plan plan{1, 2, {0}, {{{0, ActionKind::kForward, 0, {}}, {0, ActionKind::kForward, 1, {}}}}};
  plan.ranks[0][1] = {0, ActionKind::kForward, 2, {}};
  EXPECT_NE(compileProgram(plan, 0).status().toString().find("0F2"), std::string::npos);
  plan.ranks[0][1] = {1, ActionKind::kForward, 0, {}};
  EXPECT_NE(compileProgram(plan, 0).status().toString().find("1F0"), std::string::npos);
  plan.ranks[0][1] = {0, ActionKind::kSendF, 0, {}};
  EXPECT_NE(compileProgram(plan, 0).status().toString().find("0SEND_F0"), std::string::npos);
  EXPECT_NE(compileProgram(plan, 1).status().toString().find("expected 0 to 0"), std::string::npos);
}

TEST(Program, MarksTheLastBackwardsOfAStageOfBothHalvesAndWhole) {
  const auto act = [](ActionKind kind, int microbatch) { return Action{0, kind, microbatch, {}}; };
  const Plan plan{1,
                  2,
                  {0},
                  {{act(ActionKind::kForward, 0), act(ActionKind::kForward, 1), act(ActionKind::kBackwardInput, 0),
                    act(ActionKind::kBackward, 1), act(ActionKind::kBackwardWeight, 0)}}};
  const Program program = *compileProgram(plan, 0);
  EXPECT_TRUE(program.hasBackward);
  EXPECT_TRUE(program.stages[0].splitsBackward);
  const std::vector<Instruction>& instructions = program.instructions;
  EXPECT_FALSE(instructions[2].lastInputBackward);
  EXPECT_TRUE(instructions[3].lastInputBackward);
  EXPECT_FALSE(instructions[3].lastBackward);
  EXPECT_TRUE(instructions[4].lastBackward);
}

TEST(MessageTag, IsPositiveAndDistinctAtAllLimits) {
  std::set<std::int32_t> tags;
  for (const Traffic traffic : {Traffic::kActivation, Traffic::kGradient, Traffic::kHeader}) {
    for (const std::int32_t stage : {0, 1, kMaxStages - 1}) {
      for (const std::int32_t microbatch : {0, 1, kMaxMicrobatches - 1}) {
        for (const std::int32_t tensor : {0, 1, kMaxTensorsPerMessage - 1}) {
          const std::int32_t tag = messageTag(traffic, stage, microbatch, tensor);
          EXPECT_GE(tag, 1 << 29);
          EXPECT_TRUE(tags.insert(tag).second);
        }
      }
    }
  }
}

}  // namespace
}  // namespace farandole::pipeline
