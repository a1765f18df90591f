#include <gtest/gtest.h>
#include <torch/cuda.h>

#include "pipeline/schedules/registry.h"
#include "tests/pipeline/train/training.h"

namespace farandole::pipeline {
namespace {

const at::Device kGpu(at::kCUDA, 0);

// Ranks are threads that share a GPU and its default stream.
class ScheduleOnAGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  }

  static Layers onGpu(int count, std::uint64_t seed) {
    Layers layers = makeLayers(count, seed);
    for (Layer& layer : layers) layer->to(kGpu);
    return layers;
  }

  static Example batchOnGpu(std::int64_t rows) {
    const Example batch = example(rows);
    return {batch.x.to(kGpu), batch.y.to(kGpu)};
  }

  static void placeOnGpu(int /*rank*/, ScheduleConfig& config) {
    config.device = at::kCUDA;
    config.deviceBackend = config.backend;
  }
};

TEST_F(ScheduleOnAGpu, TrainsAndEvaluatesAsOneProcessDoesByEverySchedule) {
  std::uint64_t seed = 1;
  for (const std::string_view name : scheduleNames()) {
    for (const int ranks : {1, 2, 3}) {
      const int microbatches = 2 * ranks + 2;
      for (const int stages : {ranks, 2 * ranks}) {
        const Result<Plan> plan = makePlan(name, {ranks, stages, microbatches});
        if (!plan) continue;
        SCOPED_TRACE(std::string(name) + ", " + std::to_string(ranks) + " ranks, " + std::to_string(stages) +
                     " stages");
        const Layers layers = onGpu(stages, ++seed);
        OneProcess reference(*plan, onGpu(stages, seed));
        ScheduleConfig config;
        config.name = name;
        config.numStages = stages;
        config.numMicrobatches = microbatches;
        Ranks all(config, *plan, layers, placeOnGpu);
        for (const int rows : {microbatches, microbatches + 1, microbatches + 1}) {
          const Example batch = batchOnGpu(rows);
          const auto results = all.step({.inputs = {batch.x}, .target = batch.y, .wantsOutputs = true});
          expectResults(results, *plan, reference.step(batch), true);
          expectGradients(layers, reference.layers());
          if (HasFatalFailure()) return;
        }
        const Example batch = batchOnGpu(microbatches);
        expectResults(all.eval({.inputs = {batch.x}, .target = batch.y}), *plan, reference.eval(batch), false);
        EXPECT_TRUE(layers[0]->parameters()[0].grad().is_cuda());
      }
    }
  }
}

TEST_F(ScheduleOnAGpu, RefusesWhatIsElsewhere) {
  const Plan plan = *makePlan("GPipe", {2, 2, 2});
  ScheduleConfig config;
  config.name = "GPipe";
  config.numMicrobatches = 2;
  const Example batch = example(4);
  Ranks all(config, plan, onGpu(2, 7), placeOnGpu);
  expectErrors(all.step({.inputs = {batch.x}, .target = batch.y.to(kGpu)}),
               "rank 0: inputs[0] is on cpu, expected cuda:0, the schedule's device");
  Ranks ofCpu(config, plan, makeLayers(2, 7), placeOnGpu);
  expectErrors(ofCpu.step({.inputs = {batch.x}, .target = batch.y}), "of its module is on cpu, expected cuda:0");
  Ranks alone(config, plan, onGpu(2, 7), [](int, ScheduleConfig& own) { own.device = kGpu; });
  expectErrors(alone.step({.inputs = {batch.x}, .target = batch.y}),
               "deviceBackend is null, expected one that sends tensors on cuda:0");
}

}  // namespace
}  // namespace farandole::pipeline
