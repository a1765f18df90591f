#include "tests/pipeline/ir/plan_fixtures.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "pipeline/ir/csv.h"
#include "pipeline/ir/text.h"
#include "pipeline/passes/lower.h"
#include "pipeline/schedules/registry.h"

namespace farandole::pipeline {
namespace {

Plan expectPlan(Result<Plan> plan) {
  if (plan) return std::move(plan).value();
  ADD_FAILURE() << plan.status().toString();
  return {};
}

}  // namespace

Plan planOf(std::string_view csv) { return expectPlan(fromCsv(csv)); }

Plan planOf(std::string_view csv, std::vector<std::int32_t> rankOfStage) {
  return expectPlan(fromCsv(csv, std::move(rankOfStage)));
}

std::string readGolden(const std::string& name) {
  std::ifstream file(std::string(FARANDOLE_GOLDEN_DIR) + "/pipeline/" + name, std::ios::binary);
  if (!file) ADD_FAILURE() << "cannot open golden file " << name;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Plan goldenSchedule(const std::string& name) {
  Plan plan = planOf(readGolden(name));
  for (std::vector<Action>& actions : plan.ranks) {
    std::erase_if(actions, [](const Action& action) {
      return action.kind == ActionKind::kReduceGrad || action.kind == ActionKind::kWaitReduceGrad;
    });
  }
  return plan;
}

std::vector<std::string> goldenPlansWithMessages() {
  return {"1f1b_p1_m3_comms.csv",
          "1f1b_p2_m4_comms.csv",
          "1f1b_p4_m4_comms.csv",
          "1f1b_p4_m9_comms.csv",
          "gpipe_p1_m3_comms.csv",
          "gpipe_p2_m4_comms.csv",
          "gpipe_p4_m4_comms.csv",
          "gpipe_p4_m9_comms.csv",
          "interleaved1f1b_p2_m4_comms.csv",
          "interleaved1f1b_p4_m8_comms.csv",
          "interleavedzerobubble_p2_m4_comms.csv",
          "interleavedzerobubble_p4_m8_comms.csv",
          "loopedbfs_p2_m4_comms.csv",
          "loopedbfs_p4_m8_comms.csv",
          "zbv_p2_m4_comms.csv",
          "dualpipev_p2_m8_comms.csv"};
}

Plan computePlan(std::string_view schedule, std::int32_t numRanks, std::int32_t numMicrobatches) {
  return expectPlan(makePlan(schedule, {numRanks, numRanks, numMicrobatches, false}));
}

Plan loweredPlan(std::string_view schedule, std::int32_t numRanks, std::int32_t numMicrobatches) {
  return expectPlan(lower(computePlan(schedule, numRanks, numMicrobatches)));
}

std::vector<StageEdge> randomEdges(std::int32_t numStages, std::mt19937_64& random) {
  std::vector<StageEdge> edges;
  const std::size_t chainPercent = random() % 101;
  const std::size_t skipPercent = random() % 60;
  for (std::int32_t from = 0; from < numStages; ++from) {
    for (std::int32_t to = from + 1; to < numStages; ++to) {
      if (random() % 100 < (to == from + 1 ? chainPercent : skipPercent)) edges.push_back({from, to});
    }
  }
  std::shuffle(edges.begin(), edges.end(), random);
  return edges;
}

std::string edgesText(const std::vector<StageEdge>& edges) {
  std::string text;
  for (const auto& [from, to] : edges) text += std::to_string(from) + "->" + std::to_string(to) + " ";
  return text;
}

std::string rankText(const Plan& plan, std::int32_t rank) {
  std::string text;
  for (const Action& action : plan.ranks[rank]) {
    if (!text.empty()) text += ' ';
    text += toString(action);
  }
  return text;
}

}  // namespace farandole::pipeline
