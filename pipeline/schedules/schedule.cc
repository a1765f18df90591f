#include "pipeline/schedules/schedule.h"

#include <string>
#include <utility>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/stage_graph.h"

namespace farandole::pipeline {
namespace {

Status checkEdges(std::string_view schedule, const ScheduleOptions& options) {
  if (!options.edges) return Status::ok();
  Plan plan;
  plan.numStages = options.numStages;
  plan.numMicrobatches = options.numMicrobatches;
  plan.edges = options.edges;
  const Result<StageGraph> graph = StageGraph::make(plan);
  if (!graph) return graph.status().wrap("schedule " + std::string(schedule));
  for (const StageEdge& edge : *options.edges) {
    if (edge.from < edge.to) continue;
    return Status::invalidArgument("schedule " + std::string(schedule) + ": edge " + std::to_string(edge.from) +
                                   " -> " + std::to_string(edge.to) + "; expected edges from lower to higher stages");
  }
  return Status::ok();
}

}  // namespace

Status refuse(std::string_view schedule, std::string_view argument, std::int32_t value, std::string_view expected) {
  return Status::invalidArgument("schedule " + std::string(schedule) + ": " + std::string(argument) + " is " +
                                 std::to_string(value) + "; expected " + std::string(expected));
}

Status checkCounts(std::string_view schedule, const ScheduleOptions& options) {
  if (options.numRanks < 1) return refuse(schedule, "numRanks", options.numRanks, "at least 1");
  if (options.numStages < 1) return refuse(schedule, "numStages", options.numStages, "at least 1");
  if (options.numMicrobatches < 1) return refuse(schedule, "numMicrobatches", options.numMicrobatches, "at least 1");
  return checkEdges(schedule, options);
}

Status checkOneStagePerRank(std::string_view schedule, const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkCounts(schedule, options));
  if (options.numStages == options.numRanks) return Status::ok();
  return refuse(schedule, "numStages", options.numStages,
                "one per rank, numRanks = " + std::to_string(options.numRanks));
}

Status checkEqualStagesPerRank(std::string_view schedule, const ScheduleOptions& options) {
  FARANDOLE_RETURN_IF_ERROR(checkCounts(schedule, options));
  if (options.numStages % options.numRanks == 0) return Status::ok();
  return refuse(schedule, "numStages", options.numStages,
                "as many for every rank, a multiple of numRanks = " + std::to_string(options.numRanks));
}

Plan makeLoopPlan(const ScheduleOptions& options) {
  Plan plan;
  plan.numStages = options.numStages;
  plan.numMicrobatches = options.numMicrobatches;
  plan.edges = options.edges;
  for (std::int32_t stage = 0; stage < options.numStages; ++stage) {
    plan.rankOfStage.push_back(stage % options.numRanks);
  }
  plan.ranks.resize(options.numRanks);
  return plan;
}

Plan forwardsOf(Plan plan) {
  for (std::vector<Action>& actions : plan.ranks) {
    std::vector<Action> forwards;
    for (const Action& action : actions) {
      for (const Action& leaf : leaves(action)) {
        if (isForward(leaf.kind)) forwards.push_back(leaf);
      }
    }
    actions = std::move(forwards);
  }
  return plan;
}

}  // namespace farandole::pipeline
