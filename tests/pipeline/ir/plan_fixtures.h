#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// A plan from its CSV text; a text that does not parse fails the test.
Plan planOf(std::string_view csv);
Plan planOf(std::string_view csv, std::vector<std::int32_t> rankOfStage);

// One of the files of tests/golden/pipeline, written by torch.
std::string readGolden(const std::string& name);

// A golden schedule without the reductions that torch makes actions of.
Plan goldenSchedule(const std::string& name);

// The golden files of plans with communication.
std::vector<std::string> goldenPlansWithMessages();

// A schedule that must be possible: its compute actions, or lowered.
Plan computePlan(std::string_view schedule, std::int32_t numRanks, std::int32_t numMicrobatches);
Plan loweredPlan(std::string_view schedule, std::int32_t numRanks, std::int32_t numMicrobatches);

// Edges from lower to higher stages: some chain neighbours, some that skip stages, also none at all.
std::vector<StageEdge> randomEdges(std::int32_t numStages, std::mt19937_64& random);

// For error messages.
std::string edgesText(const std::vector<StageEdge>& edges);

// All actions of a rank as text, separated by spaces.
std::string rankText(const Plan& plan, std::int32_t rank);

}  // namespace farandole::pipeline
