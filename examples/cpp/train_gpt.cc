// Trains a small GPT in a pipeline, with libtorch and without Python, and compares it with plain training.
//
// usage: train_gpt [--schedule NAME] [--stages N] [--microbatches N] [--steps N] [--tolerance X]
//
// One process for each rank, started by torchrun or by hand:
//
//   torchrun --nproc-per-node 2 --no-python build/release/examples/train_gpt --schedule ZBV
//
//   export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
//   RANK=0 build/release/examples/train_gpt & RANK=1 build/release/examples/train_gpt
//
// Rank 0 repeats the training by itself: losses and final parameters must differ by no more than the tolerance.

#include <ATen/Parallel.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "examples/cpp/gpt.h"
#include "examples/cpp/launch.h"
#include "examples/cpp/options.h"
#include "pipeline/train/schedule.h"

namespace example {
namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;
using farandole::pipeline::Schedule;
using farandole::pipeline::ScheduleConfig;

constexpr int kRowsOfMicrobatch = 2;
constexpr int kSeed = 0;

torch::optim::AdamW optimizerOf(const Gpt& stages) {
  return torch::optim::AdamW(parametersOf(stages), torch::optim::AdamWOptions(3e-3));
}

Sample sampleOf(const Shape& shape, const Options& options, int step) {
  return drawSample(shape, kRowsOfMicrobatch * options.microbatches, step);
}

// The last numbers of training: of the whole model, the same on all ranks.
struct Outcome {
  at::Tensor losses;      // [steps]
  at::Tensor parameters;  // [all of them], one after another
};

ScheduleConfig configure(const Options& options, const Backend& backend) {
  ScheduleConfig config;
  config.name = options.schedule;
  config.numMicrobatches = options.microbatches;
  config.backend = backend;
  config.loss = lossOf;
  config.numStages = options.stages != 0 ? options.stages : config.numRanks();
  auto here = stagesHere(config);
  if (!here && options.stages == 0) {  // a schedule that forms a V has two on each rank
    config.numStages *= 2;
    here = stagesHere(config);
  }
  TORCH_CHECK_VALUE(here.isOk(), here.status().toString());
  return config;
}

void addOverRanks(const Backend& backend, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  if (backend) backend->allreduce(tensors)->wait();
}

Outcome trainInPipeline(const Options& options, const Shape& shape, ScheduleConfig config) {
  const Backend backend = config.backend;
  const Gpt model = makeGpt(shape, config.numStages, kSeed);
  Gpt mine;
  const std::vector<std::int32_t> here = *stagesHere(config);
  for (const std::int32_t stage : here) {
    mine.push_back(model[stage]);
    config.stages.emplace_back(stage, model[stage]);
  }
  auto optimizer = optimizerOf(mine);
  Schedule schedule(std::move(config));
  const auto plan = schedule.plan();
  TORCH_CHECK_VALUE(!plan || plan->microbatchesOfStage.empty(), "--schedule is ", options.schedule,
                    ", expected one of a single model: the copies' gradients would have to be added up");
  Outcome outcome{at::zeros({options.steps}, at::kDouble), {}};
  for (int step = 0; step < options.steps; ++step) {
    const Sample sample = sampleOf(shape, options, step);
    optimizer.zero_grad();
    const auto result = schedule.step({.inputs = {sample.input}, .target = sample.target});
    TORCH_CHECK(result.isOk(), result.status().toString());
    optimizer.step();
    if (result->losses.empty()) continue;  // the last stage is on another rank
    outcome.losses[step] = at::stack(result->losses).mean();
    std::printf("step %d: loss %.6f\n", step, outcome.losses[step].item<double>());
    std::fflush(stdout);
  }
  const at::NoGradGuard noGrad;
  std::vector<at::Tensor> parameters;
  for (const auto& stage : model) {
    const bool isMine = std::find(mine.begin(), mine.end(), stage) != mine.end();
    for (const at::Tensor& parameter : stage->parameters()) {
      parameters.push_back(isMine ? parameter.flatten() : at::zeros({parameter.numel()}, parameter.options()));
    }
  }
  outcome.parameters = at::cat(parameters);
  addOverRanks(backend, outcome.losses);
  addOverRanks(backend, outcome.parameters);
  return outcome;
}

Outcome trainAlone(const Options& options, const Shape& shape, int numStages) {
  const Gpt model = makeGpt(shape, numStages, kSeed);
  auto optimizer = optimizerOf(model);
  Outcome outcome{at::zeros({options.steps}, at::kDouble), {}};
  for (int step = 0; step < options.steps; ++step) {
    const Sample sample = sampleOf(shape, options, step);
    optimizer.zero_grad();
    at::Tensor x = sample.input;
    for (const auto& stage : model) x = stage->forward(x);
    const at::Tensor loss = lossOf(x, sample.target);
    loss.backward();
    optimizer.step();
    outcome.losses[step] = loss.detach();
  }
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : parametersOf(model)) parameters.push_back(parameter.detach().flatten());
  outcome.parameters = at::cat(parameters);
  return outcome;
}

int run(int argc, char** argv) {
  const Options options = parseOptions(argc, argv);
  at::set_num_threads(1);
  const Backend backend = joinOthers();
  const ScheduleConfig config = configure(options, backend);
  Shape shape;
  shape.layers = std::max<std::int64_t>(shape.layers, config.numStages);
  const Outcome outcome = trainInPipeline(options, shape, config);
  if (config.rank() != 0) return 0;
  const Outcome expected = trainAlone(options, shape, config.numStages);
  const double losses = (outcome.losses - expected.losses).abs().max().item<double>();
  const double parameters = (outcome.parameters - expected.parameters).abs().max().item<double>();
  const bool isSame = losses <= options.tolerance && parameters <= options.tolerance;
  std::printf(
      "%s over %d ranks, %d stages, %d microbatches; beside one process: losses differ by %.1e, parameters by "
      "%.1e, %s %.1e\n",
      config.name.c_str(), config.numRanks(), config.numStages, options.microbatches, losses, parameters,
      isSame ? "within" : "expected at most", options.tolerance);
  return isSame ? 0 : 1;
}

}  // namespace
}  // namespace example

int main(int argc, char** argv) { return example::runAsMain("train_gpt", example::run, argc, argv); }
