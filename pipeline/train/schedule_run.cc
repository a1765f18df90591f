#include "pipeline/train/schedule_run.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/plan_ends.h"
#include "pipeline/train/microbatches.h"

namespace farandole::pipeline {

Result<std::unique_ptr<ScheduleRun>> ScheduleRun::make(const ScheduleConfig& config, bool trains) {
  const Result<Plan> plan = planOf(config, !trains);
  if (!plan) return plan.status();
  if (trains && std::ranges::none_of(plan->ranks, [](const std::vector<Action>& actions) {
        return std::ranges::any_of(actions, hasInputBackward);
      })) {
    return Status::invalidArgument("the plan has no backwards, expected some for step(): or call eval()");
  }
  const Result<PlanEnds> ends = PlanEnds::of(*plan);
  if (!ends) return ends.status();

  std::unique_ptr<ScheduleRun> run(new ScheduleRun(config, trains));
  ExecutorConfig executor;
  std::vector<std::int32_t> indices;
  std::string listed;
  for (const ModuleStage& stage : config.stages) {
    indices.push_back(stage.index);
    listed += (listed.empty() ? "" : ", ") + std::to_string(stage.index);
    run->hasFirst_ = run->hasFirst_ || ends->isFirst(stage.index);
    executor.stages.push_back(run->specOf(stage, ends->isFirst(stage.index), ends->isLast(stage.index)));
  }
  run->ends_ = ends->microbatchesThatEndIn(indices);
  const std::size_t count = plan->numMicrobatches;
  run->traffic_.inputs.resize(count);
  run->traffic_.targets.resize(count);
  run->traffic_.losses.resize(count);
  run->traffic_.outputs.resize(count);

  executor.description = (config.plan ? "a plan" : config.name) + (trains ? " step" : " forward only") + ", stages " +
                         listed + ", numMicrobatches = " + std::to_string(count);
  executor.checksForNan = config.checkForNan;
  executor.device = run->device_;
  executor.deviceBackend = config.deviceBackend;
  executor.hasOneQueue = hasOneQueue(config);
  if (trains && config.scaleGrads) {
    const Result<std::int32_t> microbatches = ends->microbatchesOfOneModel();
    if (!microbatches) return microbatches.status();
    executor.lossScale = 1.0 / *microbatches;
  }
  auto made = Executor::create(*plan, config.rank(), config.backend, std::move(executor));
  if (!made) return made.status();
  run->executor_ = std::move(made).value();
  return run;
}

StageSpec ScheduleRun::specOf(const ModuleStage& stage, bool isFirst, bool isLast) {
  StageSpec spec;
  spec.index = stage.index;
  spec.outputsTo = stage.outputsTo;
  spec.forward = [this, &stage, isFirst, isLast](int microbatch, const std::vector<at::Tensor>& inputs,
                                                 std::vector<at::Tensor>& outputs) {
    stage.function(isFirst ? traffic_.inputs[microbatch] : inputs, outputs);
    if (isLast) finish(microbatch, outputs);
  };
  return spec;
}

void ScheduleRun::finish(int microbatch, std::vector<at::Tensor>& outputs) {
  if (traffic_.wantsOutputs) {
    for (const at::Tensor& output : outputs) traffic_.outputs[microbatch].push_back(output.detach());
  }
  if (traffic_.wantsLosses) {
    at::Tensor loss = config_.loss(outputs, traffic_.targets[microbatch]);
    TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1, "the loss is ",
                      loss.defined() ? "a tensor of shape " + c10::str(loss.sizes()) : "undefined",
                      ", expected a tensor of one element");
    traffic_.losses[microbatch] = loss.detach();
    outputs.clear();
    outputs.push_back(std::move(loss));
  } else {
    outputs.clear();
  }
}

Result<StepResult> ScheduleRun::step(const Batch& batch) {
  Status taken;
  try {
    taken = take(batch);
  } catch (...) {
    taken = Status::invalidArgument(describeCurrentError());
  }
  if (!taken.isOk()) {
    clear();
    return executor_->refuse(taken.toString());
  }
  describe();
  const bool relearn = !learned_ || signature_ != learnedSignature_;
  learned_ = false;
  if (Status done = executor_->step(relearn); !done.isOk()) {
    clear();
    return done;
  }
  learned_ = true;
  signature_.swap(learnedSignature_);
  Result<StepResult> result = give();
  clear();
  return result;
}

Status ScheduleRun::take(const Batch& batch) {
  if (trains_ && !config_.loss)
    return Status::invalidArgument("the schedule has no loss, expected one: or call eval()");
  if (trains_ && !at::GradMode::is_enabled()) {
    return Status::invalidArgument("gradients are disabled (NoGradGuard), expected enabled ones: or call eval()");
  }
  if (hasFirst_) FARANDOLE_RETURN_IF_ERROR(takeInputs(batch, device_, traffic_.inputs));
  if (ends_.empty()) return Status::ok();
  FARANDOLE_RETURN_IF_ERROR(takeTargets(batch, device_, traffic_.targets));
  const bool hasTargets = traffic_.targets[0].defined();
  if (trains_ && !hasTargets) {
    return Status::invalidArgument(
        "target is undefined, expected what the loss takes, on the rank with the last stage");
  }
  if (hasTargets && !config_.loss) {
    return Status::invalidArgument("target was given, expected none: the schedule has no loss");
  }
  traffic_.wantsLosses = hasTargets;
  traffic_.wantsOutputs = batch.wantsOutputs;
  return Status::ok();
}

void ScheduleRun::describe() {
  signature_.clear();
  for (const std::vector<at::Tensor>& inputs : traffic_.inputs) {
    for (const at::Tensor& input : inputs) {
      signature_.push_back(input.dim());
      signature_.insert(signature_.end(), input.sizes().begin(), input.sizes().end());
      signature_.push_back(static_cast<std::int64_t>(input.scalar_type()));
      signature_.push_back(input.requires_grad());
    }
    signature_.push_back(-1);  // ends the microbatch: no number of dimensions
  }
  for (const ModuleStage& stage : config_.stages) {
    if (stage.module == nullptr) continue;
    // What is frozen or trained decides which tensors have a gradient, and types which they are of.
    signature_.push_back(stage.module->is_training());
    for (const at::Tensor& parameter : stage.module->parameters()) {
      signature_.push_back(parameter.requires_grad());
      signature_.push_back(static_cast<std::int64_t>(parameter.scalar_type()));
    }
  }
}

Result<StepResult> ScheduleRun::give() {
  StepResult result;
  std::vector<std::vector<at::Tensor>> outputs;
  for (const std::int32_t microbatch : ends_) {
    if (traffic_.wantsLosses) result.losses.push_back(std::move(traffic_.losses[microbatch]));
    if (traffic_.wantsOutputs) outputs.push_back(std::move(traffic_.outputs[microbatch]));
  }
  Result<std::vector<at::Tensor>> merged = mergeOutputs(outputs);
  if (!merged) return merged.status();
  result.outputs = std::move(merged).value();
  return result;
}

void ScheduleRun::clear() {
  for (std::vector<at::Tensor>& inputs : traffic_.inputs) inputs.clear();
  for (std::vector<at::Tensor>& outputs : traffic_.outputs) outputs.clear();
  for (at::Tensor& target : traffic_.targets) target.reset();
  for (at::Tensor& loss : traffic_.losses) loss.reset();
  traffic_.wantsOutputs = traffic_.wantsLosses = false;
}

}  // namespace farandole::pipeline
