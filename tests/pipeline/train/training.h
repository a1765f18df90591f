#pragma once

#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/ir/plan.h"
#include "pipeline/train/schedule.h"
#include "tests/pipeline/runtime/thread_backend.h"

namespace farandole::pipeline {

inline constexpr std::int64_t kFeatures = 3;

// y = tanh(W x + b), in double; x the sum of what it is called with.
struct LayerImpl : torch::nn::Module {
  LayerImpl();
  at::Tensor forward(const std::vector<at::Tensor>& tensors);

  torch::nn::Linear linear;
  std::function<void()> before;  // called first in every forward
};
TORCH_MODULE(Layer);

using Layers = std::vector<Layer>;

// The same for the same seed.
Layers makeLayers(int count, std::uint64_t seed);

at::Tensor squares(const at::Tensor& output, const at::Tensor& target);

struct Example {
  at::Tensor x, y;
};
Example example(std::int64_t rows);

// Training in one process, without anything of the pipeline but the plan's graph: microbatch by microbatch.
class OneProcess {
 public:
  OneProcess(Plan plan, Layers layers) : plan_(std::move(plan)), layers_(std::move(layers)) {}

  struct Forward {
    std::vector<at::Tensor> outputs, losses;  // by microbatch
  };
  // Adds gradients: means over the microbatches of each model, or sums.
  Forward step(const Example& batch, bool scaleGrads = true);
  Forward eval(const Example& batch) const;
  const Layers& layers() const { return layers_; }

 private:
  Forward forward(const Example& batch, std::vector<int>* lastStages) const;

  Plan plan_;
  Layers layers_;
};

// All ranks of a pipeline, each a thread of this process.
class Ranks {
 public:
  // `adjust` may change a rank's configuration.
  Ranks(ScheduleConfig config, const Plan& plan, const Layers& layers,
        const std::function<void(int rank, ScheduleConfig&)>& adjust = nullptr);

  using Results = std::vector<Result<StepResult>>;
  Results each(const std::function<Result<StepResult>(int rank, Schedule&)>& call);
  Results step(const Batch& batch);
  Results eval(const Batch& batch);

 private:
  std::vector<std::unique_ptr<Schedule>> schedules_;
};

// Every rank returned an error with that text.
void expectErrors(const Ranks::Results& results, const std::string& text);
void expectOk(const Ranks::Results& results);

// Losses and outputs are those that end on each rank, in order.
void expectResults(const Ranks::Results& results, const Plan& plan, const OneProcess::Forward& expected,
                   bool withOutputs);
void expectGradients(const Layers& actual, const Layers& expected);

}  // namespace farandole::pipeline
