#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// A stage's part in one microbatch.
struct Turn {
  std::int32_t stage;
  std::int32_t microbatch;
};

// What 1F1B and its kin have in common, of one rank: forwards alone (the warm-up), then one forward and one backward in
// turn, then backwards alone.
struct Alternation {
  std::vector<Turn> forwards;
  std::vector<Turn> backwards;  // as many; none: forward only
  std::int32_t warmup = 0;      // forwards before the first backward of the alternation; more than there are: all
  bool isSplit = false;         // a backward is an I; its W follows the I that comes `weightDelay` later
  std::int32_t weightDelay = 0;
};

std::vector<Action> toActions(const Alternation& alternation);

// The order in which a rank runs its stages, the given ones, if it takes microbatches in groups of these sizes: a group
// through the first stage, then the same group through the second, and so on.
std::vector<Turn> turnsByGroup(const std::vector<std::int32_t>& stages, const std::vector<std::int32_t>& groups);

}  // namespace farandole::pipeline
