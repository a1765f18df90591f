#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pipeline/ir/action.h"

namespace farandole::pipeline {

// The output of a stage is an input of another one.
struct StageEdge {
  std::int32_t from = 0;
  std::int32_t to = 0;

  bool operator==(const StageEdge&) const = default;
};

// Microbatches from `begin` to `end` - 1.
struct MicrobatchRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;

  std::int32_t size() const { return end - begin; }
  bool contains(std::int32_t microbatch) const { return microbatch >= begin && microbatch < end; }
  bool operator==(const MicrobatchRange&) const = default;
};

// One training step: for every rank its actions, in the order in which it
// starts them. A generator makes one of compute actions only; the passes lower
// it to one with communication, which is what is validated and executed.
struct Plan {
  std::int32_t numStages = 0;
  std::int32_t numMicrobatches = 0;
  std::vector<std::int32_t> rankOfStage;   // [numStages]
  std::vector<std::vector<Action>> ranks;  // [number of ranks][actions]
  // The stages' graph, without cycles; none: the chain, each stage to the next.
  std::optional<std::vector<StageEdge>> edges = std::nullopt;
  // What each stage runs, [numStages], stages that an edge joins the same; empty: all stages run all microbatches.
  std::vector<MicrobatchRange> microbatchesOfStage = {};

  MicrobatchRange microbatchesOf(std::int32_t stage) const {
    return microbatchesOfStage.empty() ? MicrobatchRange{0, numMicrobatches} : microbatchesOfStage[stage];
  }
  std::int32_t numRanks() const { return static_cast<std::int32_t>(ranks.size()); }
  bool operator==(const Plan&) const = default;
};

}  // namespace farandole::pipeline
