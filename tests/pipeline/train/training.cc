#include "tests/pipeline/train/training.h"

#include <gtest/gtest.h>

#include <thread>
#include <utility>

#include "pipeline/ir/stage_graph.h"

namespace farandole::pipeline {

namespace {

constexpr double kTolerance = 1e-10;

bool same(const at::Tensor& a, const at::Tensor& b) { return at::allclose(a, b, kTolerance, kTolerance); }

}  // namespace

LayerImpl::LayerImpl() : linear(kFeatures, kFeatures) {
  register_module("linear", linear);
  to(at::kDouble);
}

at::Tensor LayerImpl::forward(const std::vector<at::Tensor>& tensors) {
  if (before) before();
  at::Tensor x = tensors.at(0);
  for (std::size_t i = 1; i < tensors.size(); ++i) x = x + tensors[i];
  return at::tanh(linear(x));
}

Layers makeLayers(int count, std::uint64_t seed) {
  at::manual_seed(seed);
  Layers layers;
  for (int i = 0; i < count; ++i) layers.emplace_back();
  return layers;
}

at::Tensor squares(const at::Tensor& output, const at::Tensor& target) { return (output - target).square().mean(); }

Example example(std::int64_t rows) {
  return {at::randn({rows, kFeatures}, at::kDouble), at::randn({rows, kFeatures}, at::kDouble)};
}

OneProcess::Forward OneProcess::forward(const Example& batch, std::vector<int>* lastStages) const {
  const StageGraph graph = *StageGraph::make(plan_);
  Forward result;
  std::int64_t row = 0;
  for (int i = 0; i < plan_.numMicrobatches; ++i) {
    const std::int64_t rows = batch.x.size(0) / plan_.numMicrobatches + (i < batch.x.size(0) % plan_.numMicrobatches);
    std::vector<at::Tensor> outputs(plan_.numStages);
    for (int stage = 0; stage < plan_.numStages; ++stage) {
      if (!plan_.microbatchesOf(stage).contains(i)) continue;
      std::vector<at::Tensor> inputs;
      for (int from = 0; from < plan_.numStages; ++from) {
        if (graph.find(from, stage) != StageGraph::kNoEdge) inputs.push_back(outputs[from]);
      }
      if (inputs.empty()) inputs.push_back(batch.x.narrow(0, row, rows));
      Layer layer = layers_[stage];
      outputs[stage] = layer->forward(inputs);
      if (!graph.outOf(stage).empty()) continue;
      result.outputs.push_back(outputs[stage]);
      result.losses.push_back(squares(outputs[stage], batch.y.narrow(0, row, rows)));
      if (lastStages != nullptr) lastStages->push_back(stage);
    }
    row += rows;
  }
  return result;
}

OneProcess::Forward OneProcess::step(const Example& batch, bool scaleGrads) {
  std::vector<int> lastStages;
  Forward result = forward(batch, &lastStages);
  for (std::size_t i = 0; i < result.losses.size(); ++i) {
    const double count = plan_.microbatchesOf(lastStages[i]).size();
    (scaleGrads ? result.losses[i] / count : result.losses[i]).backward();
  }
  return result;
}

OneProcess::Forward OneProcess::eval(const Example& batch) const {
  const at::NoGradGuard noGrad;
  return forward(batch, nullptr);
}

Ranks::Ranks(ScheduleConfig config, const Plan& plan, const Layers& layers,
             const std::function<void(int rank, ScheduleConfig&)>& adjust) {
  const auto world = std::make_shared<ThreadWorld>(plan.numRanks());
  if (!config.loss) config.loss = squares;
  for (int rank = 0; rank < plan.numRanks(); ++rank) {
    ScheduleConfig own = config;
    if (plan.numRanks() > 1) own.backend = c10::make_intrusive<ThreadBackend>(world, rank);
    for (int stage = plan.numStages - 1; stage >= 0; --stage) {
      if (plan.rankOfStage[stage] == rank) own.stages.emplace_back(stage, layers[stage]);
    }
    if (adjust) adjust(rank, own);
    schedules_.push_back(std::make_unique<Schedule>(std::move(own)));
  }
}

Ranks::Results Ranks::each(const std::function<Result<StepResult>(int rank, Schedule&)>& call) {
  Results results(schedules_.size(), Status::internal("did not run"));
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < schedules_.size(); ++rank) {
    threads.emplace_back([&, rank] { results[rank] = call(static_cast<int>(rank), *schedules_[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

Ranks::Results Ranks::step(const Batch& batch) {
  return each([&batch](int, Schedule& schedule) { return schedule.step(batch); });
}

Ranks::Results Ranks::eval(const Batch& batch) {
  return each([&batch](int, Schedule& schedule) { return schedule.eval(batch); });
}

void expectErrors(const Ranks::Results& results, const std::string& text) {
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_NE(results[rank].status().toString().find(text), std::string::npos)
        << "rank " << rank << ": " << results[rank].status().toString();
  }
}

void expectOk(const Ranks::Results& results) {
  for (const auto& result : results) ASSERT_TRUE(result.isOk()) << result.status().toString();
}

void expectResults(const Ranks::Results& results, const Plan& plan, const OneProcess::Forward& expected,
                   bool withOutputs) {
  expectOk(results);
  if (testing::Test::HasFatalFailure()) return;
  const StageGraph graph = *StageGraph::make(plan);
  for (int rank = 0; rank < plan.numRanks(); ++rank) {
    const StepResult& result = *results[rank];
    std::vector<at::Tensor> losses, outputs;
    for (int i = 0; i < plan.numMicrobatches; ++i) {
      for (int stage = 0; stage < plan.numStages; ++stage) {
        if (plan.rankOfStage[stage] != rank || !graph.outOf(stage).empty()) continue;
        if (!plan.microbatchesOf(stage).contains(i)) continue;
        losses.push_back(expected.losses[i]);
        outputs.push_back(expected.outputs[i]);
      }
    }
    ASSERT_EQ(result.losses.size(), losses.size()) << "rank " << rank;
    for (std::size_t i = 0; i < losses.size(); ++i) {
      EXPECT_FALSE(result.losses[i].requires_grad());
      EXPECT_TRUE(same(result.losses[i], losses[i])) << "rank " << rank << ", loss " << i;
    }
    ASSERT_EQ(result.outputs.size(), withOutputs && !outputs.empty() ? 1u : 0u) << "rank " << rank;
    if (result.outputs.empty()) continue;
    EXPECT_FALSE(result.outputs[0].requires_grad());
    EXPECT_TRUE(same(result.outputs[0], at::cat(outputs))) << "rank " << rank;
  }
}

void expectGradients(const Layers& actual, const Layers& expected) {
  for (std::size_t stage = 0; stage < expected.size(); ++stage) {
    const std::vector<at::Tensor> ours = actual[stage]->parameters(), theirs = expected[stage]->parameters();
    for (std::size_t i = 0; i < theirs.size(); ++i) {
      ASSERT_EQ(ours[i].grad().defined(), theirs[i].grad().defined()) << "stage " << stage << ", parameter " << i;
      if (theirs[i].grad().defined()) {
        EXPECT_TRUE(same(ours[i].grad(), theirs[i].grad())) << "stage " << stage << ", parameter " << i;
      }
    }
  }
}

}  // namespace farandole::pipeline
