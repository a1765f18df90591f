#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/ir/action.h"

namespace farandole::pipeline {

// One training step: for every rank its actions, in the order in which it
// starts them. A generator makes one of compute actions only; the passes lower
// it to one with communication, which is what is validated and executed.
struct Plan {
  std::int32_t numStages = 0;
  std::int32_t numMicrobatches = 0;
  std::vector<std::int32_t> rankOfStage;   // [numStages]
  std::vector<std::vector<Action>> ranks;  // [number of ranks][actions]

  std::int32_t numRanks() const { return static_cast<std::int32_t>(ranks.size()); }
  bool operator==(const Plan&) const = default;
};

}  // namespace farandole::pipeline
