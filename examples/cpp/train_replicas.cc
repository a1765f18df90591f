// Trains a small GPT by data parallelism, with libtorch and without Python, and compares it with plain training.
//
// usage: train_replicas [STEPS]
//
// One process for each rank, started by torchrun or by hand:
//
//   torchrun --nproc-per-node 2 --no-python build/release/examples/train_replicas
//
//   export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
//   RANK=0 build/release/examples/train_replicas & RANK=1 build/release/examples/train_replicas
//
// Each rank has its own rows of every batch. Rank 0 repeats the training by itself, with all of them: losses and final
// parameters must differ by no more than rounding.

#include <ATen/Parallel.h>
#include <torch/optim/adamw.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ddp/grad_reducer.h"
#include "examples/cpp/gpt.h"
#include "examples/cpp/launch.h"

namespace example {
namespace {

namespace ddp = farandole::ddp;

constexpr int kRowsOfRank = 2;
constexpr int kSeed = 0;
constexpr double kTolerance = 1e-9;
constexpr int kBucketSize = 20'000;  // elements: small, so that some are reduced while backward still runs

// Losses of all steps, then the parameters one after another.
struct Outcome {
  at::Tensor losses;
  at::Tensor parameters;
};

ddp::Group groupOf(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(), backend->getSize());
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  return group;
}

ddp::Model modelOf(GptStage& module) {
  ddp::Model model;
  for (const auto& named : module.named_parameters()) model.parameters.push_back({named.key(), named.value()});
  for (const auto& named : module.named_buffers()) model.buffers.push_back({named.key(), named.value()});
  return model;
}

// With a group the replica of this rank, with its rows; else all rows.
Outcome train(const Shape& shape, int steps, int ranks, const ddp::Group& group) {
  const auto module = makeGpt(shape, 1, kSeed + (group ? group->getRank() : 0))[0];
  std::shared_ptr<ddp::GradReducer> reducer;  // brings rank 0's parameters to all
  if (group) reducer = ddp::GradReducer::create(group, modelOf(*module), {.buffers = {.bucketSize = kBucketSize}});
  torch::optim::AdamW optimizer(module->parameters(), torch::optim::AdamWOptions(3e-3));
  Outcome outcome{at::zeros({steps}, at::kDouble), {}};
  for (int step = 0; step < steps; ++step) {
    Sample sample = drawSample(shape, kRowsOfRank * ranks, step);
    if (group) {
      sample.input = sample.input.narrow(0, kRowsOfRank * group->getRank(), kRowsOfRank);
      sample.target = sample.target.narrow(0, kRowsOfRank * group->getRank(), kRowsOfRank);
    }
    optimizer.zero_grad();
    if (reducer) reducer->prepareForward(true);
    const at::Tensor loss = lossOf(module->forward(sample.input), sample.target);
    loss.backward();  // returns when gradients are the averages of all ranks
    optimizer.step();
    outcome.losses[step] = loss.detach();
  }
  if (group) {
    std::vector<at::Tensor> losses{outcome.losses};
    group->allreduce(losses)->wait();
    outcome.losses /= ranks;
  }
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : module->parameters()) parameters.push_back(parameter.detach().flatten());
  outcome.parameters = at::cat(parameters);
  return outcome;
}

int run(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 20;
  TORCH_CHECK_VALUE(argc <= 2 && steps > 0, "usage: train_replicas [STEPS], with STEPS at least 1");
  at::set_num_threads(1);
  const auto backend = joinOthers();
  TORCH_CHECK_VALUE(backend, "RANK and WORLD_SIZE are not set: start it by torchrun");
  const ddp::Group group = groupOf(backend);
  const Shape shape;
  const Outcome outcome = train(shape, steps, group->getSize(), group);
  if (group->getRank() != 0) return 0;
  const Outcome expected = train(shape, steps, group->getSize(), nullptr);
  const double losses = (outcome.losses - expected.losses).abs().max().item<double>();
  const double parameters = (outcome.parameters - expected.parameters).abs().max().item<double>();
  const bool isSame = losses <= kTolerance && parameters <= kTolerance;
  std::printf(
      "%d replicas, loss %.4f -> %.4f; beside one process: losses differ by %.1e, parameters by %.1e, %s %.1e\n",
      group->getSize(), outcome.losses[0].item<double>(), outcome.losses[-1].item<double>(), losses, parameters,
      isSame ? "within" : "expected at most", kTolerance);
  return isSame ? 0 : 1;
}

}  // namespace
}  // namespace example

int main(int argc, char** argv) { return example::runAsMain("train_replicas", example::run, argc, argv); }
