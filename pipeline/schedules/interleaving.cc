#include "pipeline/schedules/interleaving.h"

#include <algorithm>
#include <string>

namespace farandole::pipeline {

namespace {

// Groups of `group`, as Megatron-LM cuts them, and one of what is left. One that is smaller than the number of ranks
// would leave these waiting, or for ever: then the rest is spread over the others.
std::vector<std::int32_t> groupSizes(std::int32_t numMicrobatches, std::int32_t group, std::int32_t numRanks) {
  const std::int32_t rest = numMicrobatches % group;
  std::vector<std::int32_t> sizes(numMicrobatches / group, group);
  if (rest == 0) return sizes;
  if (rest >= numRanks || sizes.empty()) {
    sizes.push_back(rest);
    return sizes;
  }
  const auto count = static_cast<std::int32_t>(sizes.size());
  for (std::int32_t i = 0; i < count; ++i) sizes[i] = (numMicrobatches + count - 1 - i) / count;
  return sizes;
}

}  // namespace

Result<Plan> interleave(std::string_view schedule, const ScheduleOptions& options, const FinishAlternation& finish) {
  FARANDOLE_RETURN_IF_ERROR(checkEqualStagesPerRank(schedule, options));
  if (options.microbatchGroup != 0 && options.microbatchGroup < options.numRanks) {
    const std::string ranks = std::to_string(options.numRanks);
    return refuse(schedule, "microbatchGroup", options.microbatchGroup,
                  "0 (numRanks), or numRanks = " + ranks + " and more");
  }
  const std::int32_t group = options.microbatchGroup == 0 ? options.numRanks : options.microbatchGroup;
  const std::vector<std::int32_t> groups = groupSizes(options.numMicrobatches, group, options.numRanks);
  Plan plan = makeLoopPlan(options);
  for (std::int32_t rank = 0; rank < options.numRanks; ++rank) {
    std::vector<std::int32_t> stages;
    for (std::int32_t stage = rank; stage < options.numStages; stage += options.numRanks) stages.push_back(stage);
    Alternation order;
    order.forwards = turnsByGroup(stages, groups);
    if (!options.forwardOnly) {
      std::ranges::reverse(stages);
      order.backwards = turnsByGroup(stages, groups);
    }
    finish(rank, groups.front(), order);
    plan.ranks[rank] = toActions(order);
  }
  return plan;
}

}  // namespace farandole::pipeline
