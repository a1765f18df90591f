#include "pipeline/train/schedule.h"

#include <gtest/gtest.h>

#include <random>

#include "pipeline/passes/lower.h"
#include "pipeline/schedules/registry.h"
#include "tests/pipeline/train/training.h"
#include "tests/random_seed.h"

namespace farandole::pipeline {
namespace {

ScheduleConfig named(std::string_view name, int stages, int microbatches) {
  ScheduleConfig config;
  config.name = name;
  config.numStages = stages;
  config.numMicrobatches = microbatches;
  return config;
}

torch::optim::SGD optimizerOf(const Layers& layers) {
  std::vector<at::Tensor> parameters;
  for (Layer layer : layers) {
    for (const at::Tensor& parameter : layer->parameters()) parameters.push_back(parameter);
  }
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.2).momentum(0.9));
}

TEST(Schedule, TrainsAndEvaluatesAsOneProcessDoesByEverySchedule) {
  const std::uint64_t seed = testing::someSeed();
  std::mt19937_64 rng(seed);
  for (const std::string_view name : scheduleNames()) {
    for (int round = 0; round < 3;) {
      const int ranks = 1 + static_cast<int>(rng() % 4), stages = ranks * (1 + static_cast<int>(rng() % 3));
      const int microbatches = 1 + static_cast<int>(rng() % 12);
      const Result<Plan> plan = makePlan(name, {ranks, stages, microbatches});
      if (!plan) continue;
      ++round;
      const std::uint64_t weights = rng();
      SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::string(name) + ", " + std::to_string(ranks) +
                   " ranks, " + std::to_string(stages) + " stages, " + std::to_string(microbatches) + " microbatches");
      const Layers layers = makeLayers(stages, weights);
      OneProcess reference(*plan, makeLayers(stages, weights));
      ScheduleConfig config = named(name, stages, microbatches);
      config.scaleGrads = rng() % 4 != 0;
      Ranks all(config, *plan, layers);
      torch::optim::SGD ours = optimizerOf(layers), theirs = optimizerOf(reference.layers());
      std::int64_t rows = microbatches + static_cast<int>(rng() % 7);
      for (int step = 0; step < 4; ++step) {
        if (step == 2) rows = microbatches + static_cast<int>(rng() % 7);
        const Example batch = example(rows);
        const bool wantsOutputs = rng() % 2 == 0;
        ours.zero_grad();
        theirs.zero_grad();
        const auto results = all.step({.inputs = {batch.x}, .target = batch.y, .wantsOutputs = wantsOutputs});
        expectResults(results, *plan, reference.step(batch, config.scaleGrads), wantsOutputs);
        expectGradients(layers, reference.layers());
        ours.step();
        theirs.step();
        const Example other = example(rows);
        expectResults(all.eval({.inputs = {other.x}, .target = other.y, .wantsOutputs = true}), *plan,
                      reference.eval(other), true);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(Schedule, TellsWhichStagesAPlanPlacesOnARank) {
  ScheduleConfig config = named("ZBV", 4, 2);
  config.backend = c10::make_intrusive<ThreadBackend>(std::make_shared<ThreadWorld>(2), 1);
  EXPECT_EQ(*stagesHere(config), (std::vector<std::int32_t>{1, 2}));
  config.plan = *makePlan("1F1B", {2, 2, 2});
  EXPECT_EQ(*stagesHere(config), (std::vector<std::int32_t>{1}));
  config.plan.reset();
  config.numStages = 3;
  EXPECT_EQ(stagesHere(config).status().code(), StatusCode::kInvalidArgument);
}

TEST(Schedule, TakesMicrobatchesThatAreSplitAlready) {
  const Plan plan = *makePlan("1F1B", {2, 2, 3});
  const Layers layers = makeLayers(2, 7);
  OneProcess reference(plan, makeLayers(2, 7));
  Ranks all(named("1F1B", 0, 3), plan, layers);
  const Example batch = example(8);
  Batch split;
  for (const at::Tensor& part : batch.x.tensor_split(3)) split.inputMicrobatches.push_back({part});
  split.targetMicrobatches = batch.y.tensor_split(3);
  expectResults(all.step(split), plan, reference.step(batch), false);
  expectGradients(layers, reference.layers());
  split.inputMicrobatches.pop_back();
  expectErrors(all.step(split), "rank 0: inputMicrobatches has 2 entries, expected numMicrobatches = 3");
  split.inputs = {batch.x};
  expectErrors(all.step(split), "rank 0: inputs and inputMicrobatches were given, expected one of them");
}

TEST(Schedule, RunsAPlanOfTheUsersLoweredOrNot) {
  for (const bool lowered : {false, true}) {
    Plan plan = *makePlan("ZBV", {2, 4, 5});
    std::swap(plan.ranks[0], plan.ranks[1]);  // what no schedule with a name makes
    for (std::int32_t& rank : plan.rankOfStage) rank = 1 - rank;
    if (lowered) plan = *lower(plan, ChannelModel::kTagged);
    const Layers layers = makeLayers(4, 7);
    OneProcess reference(plan, makeLayers(4, 7));
    ScheduleConfig config;
    config.plan = plan;
    Ranks all(config, plan, layers);
    const Example batch = example(11);
    expectResults(all.step({.inputs = {batch.x}, .target = batch.y}), plan, reference.step(batch), false);
    expectGradients(layers, reference.layers());
    expectResults(all.eval({.inputs = {batch.x}, .target = batch.y}), plan, reference.eval(batch), false);
  }
}

TEST(Schedule, RunsAnyGraphOfStagesAndSendsTheOutputsThatAreAskedFor) {
  ScheduleConfig config = named("Interleaved1F1B", 4, 4);
  config.edges = {{0, 1}, {0, 3}, {1, 2}, {2, 3}};
  ScheduleOptions options{2, 4, 4};
  options.edges = config.edges;
  const Plan plan = *makePlan("Interleaved1F1B", options);
  const Layers layers = makeLayers(4, 7);
  OneProcess reference(plan, makeLayers(4, 7));
  Ranks all(config, plan, layers, [&layers](int rank, ScheduleConfig& own) {
    if (rank != 0) return;
    // Both outputs go to stage 1, but for the second, which is of no use to anybody.
    Layer first = layers[0];
    own.stages.pop_back();
    own.stages.emplace_back(
        0, [first](const at::Tensor& x) mutable { return std::pair(x * 1000, first->forward({x})); }, first.ptr());
    own.stages.back().outputsTo = {{1, {1}}, {3, {1}}};
  });
  const Example batch = example(9);
  for (int step = 0; step < 2; ++step) {
    expectResults(all.step({.inputs = {batch.x}, .target = batch.y}), plan, reference.step(batch), false);
    expectGradients(layers, reference.layers());
  }
}

TEST(Schedule, LearnsAnewWhatHasAGradientWhenParametersAreFrozen) {
  const Plan plan = *makePlan("1F1B", {3, 3, 4});
  const Layers layers = makeLayers(3, 7);
  OneProcess reference(plan, makeLayers(3, 7));
  Ranks all(named("1F1B", 0, 4), plan, layers);
  const Example batch = example(8);
  for (const int frozen : {-1, 0, 1, -1}) {
    for (const Layers* some : {&layers, &reference.layers()}) {
      for (int stage = 0; stage < 3; ++stage) {
        Layer layer = (*some)[stage];
        layer->zero_grad(true);
        for (at::Tensor& parameter : layer->parameters()) parameter.requires_grad_(stage > frozen);
      }
    }
    expectResults(all.step({.inputs = {batch.x}, .target = batch.y}), plan, reference.step(batch), false);
    expectGradients(layers, reference.layers());
  }
}

TEST(Schedule, LearnsAnewWhatIsSentWhenParametersAreOfAnotherType) {
  const Layers layers = makeLayers(3, 7);
  Ranks all(named("1F1B", 0, 4), *makePlan("1F1B", {3, 3, 4}), layers, [&layers](int rank, ScheduleConfig& own) {
    Layer layer = layers[rank];
    own.stages.clear();
    own.stages.emplace_back(
        rank,
        [layer](const at::Tensor& x) mutable { return layer->forward({x.to(layer->linear->weight.scalar_type())}); },
        layer.ptr());
  });
  const Example batch = example(8);
  std::vector<at::Tensor> losses;
  for (const auto type : {at::kDouble, at::kFloat, at::kFloat, at::kDouble}) {
    Layer middle = layers[1];
    middle->zero_grad(true);
    middle->to(type);
    const auto results = all.step({.inputs = {batch.x}, .target = batch.y});
    expectOk(results);
    const std::vector<at::Tensor>& own = results[2]->losses;
    if (losses.empty()) losses = own;
    for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_TRUE(at::allclose(own.at(i), losses[i], 1e-4));
    EXPECT_EQ(middle->linear->weight.grad().scalar_type(), type);
  }
}

TEST(Schedule, EvaluatesWithoutATargetOrALoss) {
  const Plan plan = *makePlan("GPipe", {2, 2, 2});
  const Layers layers = makeLayers(2, 7);
  Ranks all(named("GPipe", 0, 2), plan, layers, [](int, ScheduleConfig& own) { own.loss = {}; });
  const Example batch = example(4);
  const auto results = all.eval({.inputs = {batch.x}, .wantsOutputs = true});
  expectOk(results);
  EXPECT_TRUE(results[1]->losses.empty());
  EXPECT_EQ(results[1]->outputs.at(0).sizes(), batch.y.sizes());
  EXPECT_FALSE(layers[0]->parameters()[0].grad().defined());
  expectErrors(all.eval({.inputs = {batch.x}, .target = batch.y}), "rank 1: target was given, expected none");
  expectErrors(all.step({.inputs = {batch.x}, .target = batch.y}), "the schedule has no loss, expected one");
}

TEST(Schedule, LeavesTrainAndEvalOfModulesAlone) {
  Layers layers = makeLayers(1, 7);
  layers[0]->eval();
  Ranks all(named("GPipe", 0, 2), *makePlan("GPipe", {1, 1, 2}), layers);
  const Example batch = example(4);
  expectOk(all.step({.inputs = {batch.x}, .target = batch.y}));
  EXPECT_FALSE(layers[0]->is_training());
}

}  // namespace
}  // namespace farandole::pipeline
