#include "pipeline/schedules/interleaved.h"

#include <algorithm>

#include "pipeline/schedules/interleaving.h"

namespace farandole::pipeline {

Result<Plan> makeInterleavedOneFOneB(const ScheduleOptions& options) {
  return interleave("Interleaved1F1B", options, [&](std::int32_t rank, std::int32_t group, Alternation& order) {
    order.warmup = 2 * (options.numRanks - rank - 1) + (options.numStages / options.numRanks - 1) * group;
  });
}

Result<Plan> makeLoopedBfs(const ScheduleOptions& options) {
  ScheduleOptions breadthFirst = options;
  // One group of all, also where these are fewer than the ranks.
  breadthFirst.microbatchGroup = std::max(options.numMicrobatches, options.numRanks);
  return interleave("LoopedBFS", breadthFirst, [](std::int32_t, std::int32_t, Alternation& order) {
    order.warmup = static_cast<std::int32_t>(order.forwards.size());
    // The last microbatch is the first to be ready everywhere.
    if (!order.backwards.empty()) order.backwards.assign(order.forwards.rbegin(), order.forwards.rend());
  });
}

}  // namespace farandole::pipeline
