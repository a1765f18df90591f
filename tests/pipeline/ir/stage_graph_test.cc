#include "pipeline/ir/stage_graph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <random>

#include "tests/pipeline/ir/plan_fixtures.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

Plan planWith(std::int32_t numStages, std::optional<std::vector<StageEdge>> edges,
              std::vector<MicrobatchRange> ranges = {}) {
  Plan plan;
  plan.numStages = numStages;
  plan.numMicrobatches = 4;
  plan.edges = std::move(edges);
  plan.microbatchesOfStage = std::move(ranges);
  return plan;
}

std::string refusal(const Plan& plan) { return StageGraph::make(plan).status().toString(); }

TEST(StageGraph, IsTheChainWhereNoneIsGiven) {
  const StageGraph graph = *StageGraph::make(planWith(4, std::nullopt));
  ASSERT_EQ(graph.numEdges(), 3);
  for (std::int32_t stage = 0; stage < 3; ++stage) {
    EXPECT_EQ(graph.edge(stage), (StageEdge{stage, stage + 1}));
    EXPECT_EQ(graph.find(stage, stage + 1), stage);
  }
  EXPECT_TRUE(graph.into(0).empty());
  EXPECT_TRUE(graph.outOf(3).empty());
  EXPECT_EQ(graph.find(0, 2), StageGraph::kNoEdge);
  EXPECT_EQ(StageGraph::make(planWith(1, std::nullopt))->numEdges(), 0);
}

TEST(StageGraph, ListsTheEdgesOfEveryStage) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    const auto numStages = static_cast<std::int32_t>(1 + random() % 9);
    // Any order of stages will do, not only their own.
    std::vector<std::int32_t> order(static_cast<std::size_t>(numStages));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, random);
    std::vector<StageEdge> edges = randomEdges(numStages, random);
    for (StageEdge& edge : edges) edge = {order[edge.from], order[edge.to]};
    const Result<StageGraph> graph = StageGraph::make(planWith(numStages, edges));
    ASSERT_TRUE(graph) << graph.status().toString();
    ASSERT_EQ(graph->numEdges(), static_cast<std::int32_t>(edges.size()));
    std::size_t numFound = 0;
    for (std::int32_t from = 0; from < numStages; ++from) {
      for (std::int32_t to = 0; to < numStages; ++to) {
        const std::int32_t number = graph->find(from, to);
        const bool isThere = std::ranges::find(edges, StageEdge{from, to}) != edges.end();
        ASSERT_EQ(number != StageGraph::kNoEdge, isThere) << from << " -> " << to << ": " << edgesText(edges);
        if (!isThere) continue;
        EXPECT_EQ(graph->edge(number), (StageEdge{from, to}));
        EXPECT_EQ(std::ranges::count(graph->outOf(from), number), 1);
        EXPECT_EQ(std::ranges::count(graph->into(to), number), 1);
        ++numFound;
      }
    }
    EXPECT_EQ(numFound, edges.size());
  }
}

TEST(StageGraph, RefusesWhatIsNoGraphOfTheStages) {
  EXPECT_EQ(refusal(planWith(3, {{{0, 3}}})), "edge 0 -> 3: expected two different stages of 0 to 2");
  EXPECT_EQ(refusal(planWith(3, {{{-1, 2}}})), "edge -1 -> 2: expected two different stages of 0 to 2");
  EXPECT_EQ(refusal(planWith(3, {{{1, 1}}})), "edge 1 -> 1: expected two different stages of 0 to 2");
  EXPECT_EQ(refusal(planWith(3, {{{0, 2}, {0, 1}, {0, 2}}})),
            "edge 0 -> 2 is there twice; expected one, which carries several tensors");
}

TEST(StageGraph, RefusesCycles) {
  EXPECT_EQ(refusal(planWith(2, {{{0, 1}, {1, 0}}})), "edges form a cycle before or at stage 0; expected none");
  EXPECT_EQ(refusal(planWith(4, {{{0, 1}, {1, 2}, {2, 3}, {3, 1}}})),
            "edges form a cycle before or at stage 1; expected none");
}

TEST(StageGraph, RefusesEdgesBetweenStagesThatRunDifferentMicrobatches) {
  EXPECT_TRUE(StageGraph::make(planWith(3, {{{0, 1}}}, {{0, 2}, {0, 2}, {2, 4}})));
  EXPECT_EQ(refusal(planWith(3, {{{0, 1}, {1, 2}}}, {{0, 2}, {0, 2}, {2, 4}})),
            "edge 1 -> 2: it comes from microbatches 0 to 1 and leads to microbatches 2 to 3; expected stages that are "
            "joined to run the same ones");
}

}  // namespace
}  // namespace farandole::pipeline
