#pragma once

#include <memory>

#include "pipeline/train/batch.h"
#include "pipeline/train/schedule_config.h"
#include "pipeline/train/schedule_run.h"

namespace farandole::pipeline {

// Trains a model of torch::nn that is cut into stages over the ranks of a c10d backend. Every rank makes one with its
// stages, and all of them call step() and eval() alike, each from one thread:
//
//   ScheduleConfig config;
//   config.name = "1F1B";
//   config.numMicrobatches = 8;
//   config.backend = backend;
//   config.stages.emplace_back(backend->getRank(), module);
//   config.loss = [](const at::Tensor& output, const at::Tensor& target) { return at::mse_loss(output, target); };
//   Schedule schedule(std::move(config));
//   const Result<StepResult> result = schedule.step({.inputs = {x}, .target = y});
//
// An error is one of all ranks, wherever it came from: a configuration or a batch that does not fit, a module that
// throws. It names rank, stage and microbatch, and the next step runs; after an error of the transport none does.
class Schedule {
 public:
  explicit Schedule(ScheduleConfig config);
  Schedule(const Schedule&) = delete;

  // Forwards and backwards of the whole pipeline: gradients are added to .grad of the parameters. After an error they
  // are undefined.
  Result<StepResult> step(const Batch& batch);

  // Forwards alone, without gradients; losses where there is a target.
  Result<StepResult> eval(const Batch& batch);

  // What each rank runs, with communication.
  Result<Plan> plan(bool forwardOnly = false) const { return planOf(config_, forwardOnly); }

 private:
  Result<StepResult> run(std::unique_ptr<ScheduleRun>& run, bool trains, const Batch& batch);
  Status refuse(const Status& reason) const;

  ScheduleConfig config_;
  std::unique_ptr<ScheduleRun> training_, evaluation_;  // made when they are first used
  bool isRunning_ = false;
};

}  // namespace farandole::pipeline
