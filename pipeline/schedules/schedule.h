#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// What every schedule is made for.
struct ScheduleOptions {
  std::int32_t numRanks = 1;
  std::int32_t numStages = 1;
  std::int32_t numMicrobatches = 1;
  bool forwardOnly = false;
  // 1F1B: forwards of the warm-up for each stage that follows; 1 as in Megatron-LM, 2 as in PiPPy.
  std::int32_t warmupPerStage = 1;
  // Interleaved schedules: microbatches that a rank runs through one of its stages before it goes on to the next one
  // (Megatron-LM's microbatch group); 0: numRanks.
  std::int32_t microbatchGroup = 0;
  // Which stages' outputs go where, from lower to higher stages, so that every schedule's order suits them; none: each
  // stage's to the next one.
  std::optional<std::vector<StageEdge>> edges = std::nullopt;
};

// A schedule: options to a plan of compute actions only.
using ScheduleGenerator = Result<Plan> (*)(const ScheduleOptions&);

// That all counts are at least 1, and that the edges go up; `schedule` is named in the error.
Status checkCounts(std::string_view schedule, const ScheduleOptions& options);

// An error that names them.
Status refuse(std::string_view schedule, std::string_view option, std::int32_t value, std::string_view expected);

// That all counts are at least 1, and that there is one stage per rank.
Status checkOneStagePerRank(std::string_view schedule, const ScheduleOptions& options);

// The same, and that every rank has equally many stages.
Status checkEqualStagesPerRank(std::string_view schedule, const ScheduleOptions& options);

// A plan without actions, whose stages go round: rank i owns i, i + numRanks, i + 2 numRanks and so on.
Plan makeLoopPlan(const ScheduleOptions& options);

// The plan without what is not a forward.
Plan forwardsOf(Plan plan);

}  // namespace farandole::pipeline
