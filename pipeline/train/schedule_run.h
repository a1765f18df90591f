#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pipeline/runtime/executor.h"
#include "pipeline/train/batch.h"
#include "pipeline/train/schedule_config.h"

namespace farandole::pipeline {

// A compiled plan, for training or for evaluation: brings batches into its steps. Owned by a schedule; one thread.
class ScheduleRun {
 public:
  // `config` outlives it.
  static Result<std::unique_ptr<ScheduleRun>> make(const ScheduleConfig& config, bool trains);

  ScheduleRun(const ScheduleRun&) = delete;

  // On all ranks; an error of one is an error of all.
  Result<StepResult> step(const Batch& batch);

 private:
  // What the stages take and give in one step, by microbatch; lists that are kept from step to step.
  struct Traffic {
    std::vector<std::vector<at::Tensor>> inputs;
    std::vector<at::Tensor> targets;
    std::vector<at::Tensor> losses;
    std::vector<std::vector<at::Tensor>> outputs;
    bool wantsOutputs = false;
    bool wantsLosses = false;
  };

  ScheduleRun(const ScheduleConfig& config, bool trains)
      : config_(config), trains_(trains), device_(deviceOf(config)) {}

  StageSpec specOf(const ModuleStage& stage, bool isFirst, bool isLast);
  void finish(int microbatch, std::vector<at::Tensor>& outputs);
  Status take(const Batch& batch);
  void describe();
  Result<StepResult> give();
  void clear();

  const ScheduleConfig& config_;
  const bool trains_;
  const at::Device device_;         // of the stages
  bool hasFirst_ = false;           // one of this rank's stages takes the inputs
  std::vector<std::int32_t> ends_;  // the microbatches that end here
  Traffic traffic_;
  std::vector<std::int64_t> signature_, learnedSignature_;  // what decides the shapes that flow
  bool learned_ = false;
  std::unique_ptr<Executor> executor_;
};

}  // namespace farandole::pipeline
