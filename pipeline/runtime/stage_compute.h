#pragma once

#include <ATen/ATen.h>

#include <span>
#include <string>
#include <vector>

#include "pipeline/runtime/executor_config.h"
#include "pipeline/runtime/program.h"
#include "pipeline/runtime/split_backward.h"
#include "pipeline/runtime/stage.h"
#include "pipeline/runtime/stage_traffic.h"
#include "pipeline/runtime/step_failure.h"

namespace farandole::pipeline {

// Computes what the compute actions of a program name, on tensors that have arrived. What a stage throws becomes a
// failure of the step. Owned and used by the executor.
class StageCompute {
 public:
  StageCompute(const Program& program, const ExecutorConfig& config, StageTraffic& traffic, StepFailure& failure)
      : program_(program), config_(config), traffic_(traffic), failure_(failure) {}

  // `lossScales`: as for Executor::step(), and alive until the step has ended.
  void beginStep(std::vector<Stage>& stages, std::span<const double> lossScales);

  // The module, and for the last stage the loss. `learning`: in a step that learns shapes.
  void forward(Stage& stage, std::int32_t microbatch, bool learning);
  // Checks what it returned, and hands it to the next stage; zeros in a step that failed.
  void handOver(Stage& stage, std::int32_t microbatch);

  // B, I or W.
  void backward(Stage& stage, const Instruction& instruction);

 private:
  void runForward(Stage& stage, std::int32_t microbatch);
  void takeLoss(Stage& stage, std::int32_t microbatch);
  void seedLoss(MicrobatchSlot& slot, const at::Tensor& loss, double scale);
  void giveOutputs(Stage& stage, std::int32_t microbatch);
  void giveZeros(Stage& stage, std::int32_t microbatch);
  void compute(Stage& stage, const Instruction& instruction);
  static void runWeight(MicrobatchSlot& slot);
  void takeUnsplittable(Stage& stage);
  void returnInputGrads(Stage& stage, std::int32_t microbatch);
  // Undefined where nothing flowed, or in a step that failed.
  at::Tensor takeInputGrad(const Stage& stage, std::int32_t microbatch, std::size_t input);

  const Program& program_;
  const ExecutorConfig& config_;
  StageTraffic& traffic_;
  StepFailure& failure_;
  SplitBackward split_;
  std::vector<at::Tensor> outputs_, grads_;  // scratch
  std::span<const double> lossScales_;
};

}  // namespace farandole::pipeline
