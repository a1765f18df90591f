#include "pipeline/schedules/dual_pipe.h"

#include <algorithm>
#include <string>

#include "pipeline/schedules/dual_pipe_order.h"
#include "pipeline/schedules/placement.h"

namespace farandole::pipeline {
namespace {

Status check(const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkTwoStagesPerRank("DualPipe", options));
  const std::int32_t p = options.numRanks;
  if (p % 2 != 0) return refuse("DualPipe", "numRanks", p, "an even number");
  if (options.numMicrobatches % 2 != 0 || options.numMicrobatches < 2 * p) {
    return refuse("DualPipe", "numMicrobatches", options.numMicrobatches,
                  "an even number, at least 2 numRanks = " + std::to_string(2 * p));
  }
  for (const auto& [from, to] : options.edges.value_or(std::vector<StageEdge>())) {
    if (to < p) continue;
    return Status::invalidArgument("schedule DualPipe: edge " + std::to_string(from) + " -> " + std::to_string(to) +
                                   "; expected edges of the first copy, stages 0 to " + std::to_string(p - 1) +
                                   ", for the second one has the same");
  }
  return Status::ok();
}

std::vector<StageEdge> edgesOfBoth(const ScheduleOptions& options) {
  const std::int32_t p = options.numRanks;
  std::vector<StageEdge> edges;
  if (options.edges) {
    edges = *options.edges;
  } else {
    for (std::int32_t stage = 0; stage + 1 < p; ++stage) edges.push_back({stage, stage + 1});
  }
  const std::size_t count = edges.size();
  for (std::size_t i = 0; i < count; ++i) edges.push_back({edges[i].from + p, edges[i].to + p});
  return edges;
}

}  // namespace

Result<Plan> makeDualPipe(const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(check(options));
  const std::int32_t p = options.numRanks;
  const std::int32_t half = options.numMicrobatches / 2;
  Plan plan = makeVPlan(options);
  plan.edges = edgesOfBoth(options);
  for (std::int32_t stage = 0; stage < options.numStages; ++stage) {
    plan.microbatchesOfStage.push_back(stage < p ? MicrobatchRange{0, half} : MicrobatchRange{half, 2 * half});
  }
  for (std::int32_t r = 0; r < p; ++r) {
    const ChunkRank::Chunk first{r, plan.microbatchesOf(r)};
    const ChunkRank::Chunk second{2 * p - 1 - r, plan.microbatchesOf(2 * p - 1 - r)};
    const bool isFirstHalf = r < p / 2;
    // The copy whose microbatches begin on the rank's side of the middle leads there.
    ChunkRank rank({isFirstHalf ? first : second, isFirstHalf ? second : first}, plan.ranks[r]);
    addDualPipeOrder(rank, p / 2, std::min(r, p - 1 - r), half);
  }
  return options.forwardOnly ? forwardsOf(std::move(plan)) : plan;
}

}  // namespace farandole::pipeline
