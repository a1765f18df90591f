#include <gtest/gtest.h>

#include <random>

#include "pipeline/ir/csv.h"
#include "tests/pipeline/runtime/executor_model.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

TEST(Executor, TrainsAsPlainAutogradDoesByEverySchedule) {
  const std::uint64_t seed = testing::someSeed();
  std::mt19937_64 rng(seed);
  for (const std::string_view name : scheduleNames()) {
    for (int round = 0; round < 3; ++round) {
      Model model(randomPlan(name, rng), rng());
      SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::string(name) + ", " +
                   std::to_string(model.plan.numRanks()) + " ranks, " + std::to_string(model.plan.numStages) +
                   " stages, " + std::to_string(model.plan.numMicrobatches) + " microbatches");
      Ranks all(model);
      for (int step = 0; step < 3; ++step) {
        model.zeroGrad();
        all.stepOk(step == 2);
        model.expectGradients();
      }
    }
  }
}

// Edges from lower to higher stages; all stages but the first have one into them.
std::vector<StageEdge> randomEdges(int stages, std::mt19937_64& rng) {
  std::vector<StageEdge> edges;
  for (int to = 1; to < stages; ++to) {
    const int always = static_cast<int>(rng() % to);
    for (int from = 0; from < to; ++from) {
      if (from == always || rng() % 4 == 0) edges.push_back({from, to});
    }
  }
  return edges;
}

TEST(Executor, TrainsAnyGraphOfStagesByEverySchedule) {
  const std::uint64_t seed = testing::someSeed();
  std::mt19937_64 rng(seed);
  for (const std::string_view name : scheduleNames()) {
    if (name == "DualPipe") continue;  // two copies: see the test above
    for (int round = 0; round < 4; ++round) {
      const Plan chain = randomPlan(name, rng);
      ScheduleOptions options{chain.numRanks(), chain.numStages, chain.numMicrobatches, false};
      options.edges = randomEdges(chain.numStages, rng);
      Model model(*lower(*makePlan(name, options), ChannelModel::kTagged), rng());
      model.hasTwoOutputs = rng() % 3 != 0;
      for (const StageEdge& edge : *options.edges) {
        if (!model.hasTwoOutputs || rng() % 2 == 0) continue;
        if (rng() % 3 == 0) {
          model.selected.push_back({edge, {1, 0}});
        } else {
          model.selected.push_back({edge, {static_cast<std::int32_t>(rng() % 2)}});
        }
      }
      SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::string(name) + ", " + toCsv(model.plan));
      Ranks all(model);
      for (int step = 0; step < 3; ++step) {
        model.zeroGrad();
        all.stepOk(step == 2);
        model.expectGradients();
      }
      model.failStage = static_cast<int>(rng() % model.plan.numStages);
      model.failMicrobatch = static_cast<int>(rng() % model.plan.numMicrobatches);
      for (const Status& status : all.step(rng() % 2 == 0)) EXPECT_EQ(status.code(), StatusCode::kInternal);
      model.failStage = -1;
      model.zeroGrad();
      all.stepOk();
      model.expectGradients();
    }
  }
}

TEST(Executor, AnOutputThatIsNotThereCannotGoAnywhere) {
  Model model(*lower(*makePlan("GPipe", {2, 2, 2, false})), 7);
  model.selected.push_back({{0, 1}, {1}});
  Ranks all(model);
  for (const Status& status : all.step()) {
    EXPECT_NE(status.toString().find("returned 1 tensors, expected more: output 1 goes to stage 1"), std::string::npos)
        << status.toString();
  }
}

}  // namespace
}  // namespace farandole::pipeline
