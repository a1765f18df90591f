#include "pipeline/runtime/executor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include "pipeline/runtime/shape_exchange.h"

namespace farandole::pipeline {

namespace {

std::int64_t systemTimeNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

at::Tensor zerosOf(const TensorMeta& meta) { return at::zeros(meta.sizes, meta.dtype); }

// What a stage may send: defined, dense, on the CPU.
Status checkSendable(const std::vector<at::Tensor>& outputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& output = outputs[i];
    if (!output.defined() || output.layout() != at::kStrided || !output.device().is_cpu()) {
      return Status::invalidArgument(
          "output " + std::to_string(i) + " is " +
          (output.defined() ? "a " + std::string(c10::str(output.layout())) + " tensor on " + output.device().str()
                            : std::string("undefined")) +
          ", expected a dense tensor on the stage's device cpu");
    }
  }
  return Status::ok();
}

}  // namespace

Result<std::unique_ptr<Executor>> Executor::create(const Plan& lowered, int rank,
                                                   const c10::intrusive_ptr<c10d::Backend>& backend,
                                                   ExecutorConfig config) {
  Result<Program> program = compileProgram(lowered, rank);
  if (!program) return program.status();
  if (lowered.numRanks() > 1 && !backend) {
    return Status::invalidArgument("backend is null, expected one that reaches " + std::to_string(lowered.numRanks()) +
                                   " ranks");
  }
  bool same = config.stages.size() == program->stages.size();
  for (std::size_t i = 0; same && i < config.stages.size(); ++i) {
    same = config.stages[i].index == program->stages[i] && config.stages[i].forward;
  }
  if (!same) {
    return Status::invalidArgument("stages are not those that the plan places on rank " + std::to_string(rank) +
                                   ", in ascending order and with a forward function each");
  }
  const int numRanks = lowered.numRanks();
  if (numRanks > 1 && backend->getSize() != numRanks) {
    return Status::invalidArgument("the group has " + std::to_string(backend->getSize()) + " ranks, expected " +
                                   std::to_string(numRanks) + " as the plan has");
  }
  return std::unique_ptr<Executor>(new Executor(std::move(program).value(), backend, std::move(config)));
}

Executor::Executor(Program program, const c10::intrusive_ptr<c10d::Backend>& backend, ExecutorConfig config)
    : program_(std::move(program)),
      config_(std::move(config)),
      agreement_(backend, backend ? backend->getSize() : 1),
      traffic_(program_, stages_, makeChannel(backend)) {
  if (config_.rankName.empty()) config_.rankName = "rank " + std::to_string(program_.rank);
  for (StageSpec& spec : config_.stages) {
    stages_.emplace_back(std::move(spec), program_.numStages, program_.numMicrobatches);
    Stage& stage = stages_.back();
    const auto local = [&](std::int32_t index) {
      return index >= 0 && index < program_.numStages && program_.rankOfStage[index] == program_.rank;
    };
    stage.previousIsLocal = local(stage.spec.index - 1);
    stage.nextIsLocal = local(stage.spec.index + 1);
  }
  trace_.steps.reserve(program_.steps.size());
}

Status Executor::step(bool relearn) {
  if (!broken_.isOk()) return broken_;
  began_ = std::chrono::steady_clock::now();
  trace_.steps.clear();
  trace_.computeSeconds = trace_.seconds = 0;
  failed_ = agreed_ = false;
  failure_ = {};
  const at::AutoGradMode gradMode(program_.hasBackward);
  std::uint32_t at = 0;
  try {
    agreement_.postVote({false, relearn || !learned_, program_.digest});
    if (program_.hasBackward) {
      for (Stage& stage : stages_) requireGradSync(stage, 0, false);
    }
    if (Status status = replay(); !status.isOk()) return status;
    at = static_cast<std::uint32_t>(program_.steps.size());
    return conclude();
  } catch (...) {
    at = std::max<std::uint32_t>(at, static_cast<std::uint32_t>(trace_.steps.size()));
    if (!agreed_) return transportBroke("the beginning of the step");
    return transportBroke(at < program_.labels.size() ? "action " + program_.labels[at] : "the end of the step");
  }
}

Status Executor::refuse(std::string reason) {
  if (!broken_.isOk()) return broken_;
  failed_ = agreed_ = false;
  failure_ = {true, systemTimeNs(), config_.rankName + ": " + std::move(reason)};
  try {
    agreement_.postVote({true, true, program_.digest});
    return agree();
  } catch (...) {
    return transportBroke("the beginning of a step");
  }
}

Status Executor::agree() {
  if (agreed_) return Status::ok();
  const StepAgreement::Outcome outcome = agreement_.awaitVote();
  agreed_ = true;
  if (outcome.refused || !outcome.samePlan) {
    if (!outcome.samePlan && !failure_.failed) {
      failure_ = {true, 0, config_.rankName + " runs " + config_.description};
    }
    const std::string text = describeFailures(agreement_.exchangeReports(failure_));
    traffic_.reset(true);
    learned_ = false;
    return Status::invalidArgument(
        (outcome.samePlan ? "the step cannot run: " : "the ranks do not run the same step: ") + text);
  }
  learning_ = outcome.relearn;
  traffic_.beginStep(learning_);
  return Status::ok();
}

Status Executor::replay() {
  for (std::uint32_t i = 0; i < program_.steps.size(); ++i) {
    const Step& step = program_.steps[i];
    at::RecordFunction range(at::RecordScope::USER_SCOPE);
    if (range.isActive()) range.before(program_.labels[i]);
    TimedStep time{i, now(), 0};
    switch (step.op) {
      case StepOp::kForward: FARANDOLE_RETURN_IF_ERROR(forward(step, time)); break;
      case StepOp::kBackward: backward(step, time); break;
      case StepOp::kPost:
        FARANDOLE_RETURN_IF_ERROR(agree());
        traffic_.post(step);
        break;
      case StepOp::kWaitSend: traffic_.waitSends(step); break;
    }
    time.end = now();
    trace_.steps.push_back(time);
    if (step.op == StepOp::kForward || step.op == StepOp::kBackward) trace_.computeSeconds += time.end - time.start;
  }
  return agree();
}

Status Executor::conclude() {
  traffic_.finishStep();
  const bool anyFailed = agreement_.anyFailed(failure_.failed);
  trace_.seconds = now();
  learned_ = !anyFailed;
  if (!anyFailed) return Status::ok();
  const std::string text = describeFailures(agreement_.exchangeReports(failure_));
  traffic_.reset(true);
  return Status::internal("the step failed, its gradients are undefined: " + text);
}

Status Executor::forward(const Step& step, TimedStep& time) {
  Stage& stage = stages_[step.stage];
  MicrobatchSlot& slot = stage.slots[step.microbatch];
  if (!stage.isFirst) {
    FARANDOLE_RETURN_IF_ERROR(agree());
    if (stage.previousIsLocal) {
      takeLocalInputs(stage, step.microbatch);
    } else if (Status status = traffic_.awaitActivation(stage, step.microbatch); !status.isOk()) {
      broken_ = status;  // what else is on the wire is unknown
      abandonGradSync(config_.rankName + ": " + status.toString());
      return status;
    }
    if (slot.inputPoisoned && !failed_) {
      failed_ = true;
      abandonGradSync(config_.rankName + ": a stage before stage " + std::to_string(stage.spec.index) +
                      " of its pipeline failed");
    }
  }
  time.start = now();
  if (!failed_) compute(stage, step.microbatch);
  if (!agreed_) {
    const double before = now();
    FARANDOLE_RETURN_IF_ERROR(agree());
    time.start += now() - before;
  }
  takeOutputs(stage, step.microbatch);
  if (!program_.hasBackward) {
    outputs_.clear();
    traffic_.releaseInputs(slot);
  }
  return Status::ok();
}

void Executor::compute(Stage& stage, std::int32_t microbatch) {
  outputs_.clear();
  const MicrobatchSlot& slot = stage.slots[microbatch];
  if (learning_ && stage.spec.declaredInputs && !stage.isFirst) {
    if (Status status = checkDeclared("inputs", *stage.spec.declaredInputs, slot.inputMetas); !status.isOk()) {
      return fail(stage, microbatch, std::string(status.message()));
    }
  }
  try {
    stage.spec.forward(microbatch, slot.inputs, outputs_);
  } catch (...) {
    fail(stage, microbatch, "forward: " + currentError());
  }
}

void Executor::takeOutputs(Stage& stage, std::int32_t microbatch) {
  MicrobatchSlot& slot = stage.slots[microbatch];
  if (stage.isLast) {
    if (failed_ || !program_.hasBackward) return;
    const at::Tensor& loss = outputs_.empty() ? at::Tensor() : outputs_[0];
    if (outputs_.size() != 1 || !loss.defined() || loss.numel() != 1 || !loss.requires_grad()) {
      return fail(stage, microbatch,
                  "the loss is " +
                      (loss.defined() ? toString(TensorMeta::of(loss)) : std::to_string(outputs_.size()) + " tensors") +
                      ", expected a tensor of one element that requires grad");
    }
    if (!lossSeed_.defined() || lossSeed_.scalar_type() != loss.scalar_type() || lossSeed_.sizes() != loss.sizes()) {
      lossSeed_ = at::full(loss.sizes(), config_.lossScale, loss.options().requires_grad(false));
    }
    slot.roots.push_back(torch::autograd::impl::gradient_edge(loss));
    slot.outputGrads.push_back(lossSeed_);
    outputs_.clear();
    return;
  }
  if (!failed_) {
    if (Status status = checkSendable(outputs_); !status.isOk()) {
      fail(stage, microbatch, std::string(status.message()));
    } else if (!slot.outputsKnown) {
      slot.outputMetas.clear();
      for (const at::Tensor& output : outputs_) slot.outputMetas.push_back(TensorMeta::of(output));
      Status fits = encodeHeader(slot.outputMetas).status();
      if (fits.isOk() && stage.spec.declaredOutputs) {
        fits = checkDeclared("outputs", *stage.spec.declaredOutputs, slot.outputMetas);
      }
      if (!fits.isOk()) fail(stage, microbatch, std::string(fits.message()));
      slot.outputsKnown = fits.isOk();
    } else {
      bool same = slot.outputMetas.size() == outputs_.size();
      for (std::size_t i = 0; same && i < outputs_.size(); ++i) same = slot.outputMetas[i].matches(outputs_[i]);
      if (!same) {
        std::vector<TensorMeta> metas;
        for (const at::Tensor& output : outputs_) metas.push_back(TensorMeta::of(output));
        fail(stage, microbatch,
             "the outputs are " + toString(metas) + ", expected " + toString(slot.outputMetas) +
                 " as in the step before, whose inputs had the same shapes");
      }
    }
  }
  if (failed_) {
    outputs_.clear();
    slot.outputPoisoned = !slot.outputsKnown;
    if (!slot.outputPoisoned) {
      for (const TensorMeta& meta : slot.outputMetas) outputs_.push_back(zerosOf(meta));
    }
  } else if (program_.hasBackward) {
    for (const at::Tensor& output : outputs_) {
      if (output.requires_grad()) slot.roots.push_back(torch::autograd::impl::gradient_edge(output));
    }
  }
  if (stage.nextIsLocal) {
    for (const at::Tensor& output : outputs_) slot.outputs.push_back(output.detach());
  } else {
    traffic_.setOutputs(stage, microbatch, outputs_);
  }
  outputs_.clear();
}

void Executor::takeLocalInputs(Stage& stage, std::int32_t microbatch) {
  MicrobatchSlot& from = stages_[&stage - stages_.data() - 1].slots[microbatch];
  MicrobatchSlot& slot = stage.slots[microbatch];
  slot.inputPoisoned = from.outputPoisoned;
  slot.inputMetas = from.outputMetas;
  slot.inputsKnown = from.outputsKnown;
  slot.inputs = std::move(from.outputs);
  from.outputs.clear();
  if (!program_.hasBackward) return;
  for (std::size_t i = 0; i < slot.inputs.size(); ++i) {
    if (slot.inputMetas[i].requiresGrad) slot.inputs[i].set_requires_grad(true);
  }
}

void Executor::backward(const Step& step, TimedStep& time) {
  Stage& stage = stages_[step.stage];
  MicrobatchSlot& slot = stage.slots[step.microbatch];
  if (!stage.isLast && !stage.nextIsLocal) traffic_.awaitGradient(stage, step.microbatch);
  time.start = now();
  if (!failed_ && step.lastBackward) requireGradSync(stage, step.microbatch, true);
  if (!failed_ && !slot.roots.empty()) {
    try {
      torch::autograd::Engine::get_default_engine().execute(slot.roots, slot.outputGrads, /*keep_graph=*/false,
                                                            /*create_graph=*/false, /*accumulate_grad=*/true);
    } catch (...) {
      fail(stage, step.microbatch, "backward: " + currentError());
    }
  }
  slot.roots.clear();
  if (!stage.isFirst) returnInputGrads(stage, step.microbatch);
  traffic_.releaseInputs(slot);
}

void Executor::returnInputGrads(Stage& stage, std::int32_t microbatch) {
  MicrobatchSlot& slot = stage.slots[microbatch];
  if (slot.inputPoisoned) return;
  grads_.resize(slot.inputMetas.size());
  for (std::size_t i = 0; i < grads_.size(); ++i) {
    grads_[i] = at::Tensor();
    if (!slot.inputMetas[i].requiresGrad) continue;
    if (!failed_) grads_[i] = slot.inputs[i].grad();
    if (!grads_[i].defined()) grads_[i] = zerosOf(slot.inputMetas[i]);
  }
  if (stage.previousIsLocal) {
    MicrobatchSlot& to = stages_[&stage - stages_.data() - 1].slots[microbatch];
    to.outputGrads.clear();
    for (at::Tensor& grad : grads_) {
      if (grad.defined()) to.outputGrads.push_back(std::move(grad));
    }
  } else {
    traffic_.setInputGrads(stage, microbatch, grads_);
  }
  grads_.clear();
}

void Executor::requireGradSync(Stage& stage, std::int32_t microbatch, bool required) {
  if (!stage.spec.requireGradSync) return;
  try {
    stage.spec.requireGradSync(required);
  } catch (...) {
    fail(stage, microbatch, "switching gradient reduction: " + currentError());
  }
}

void Executor::fail(const Stage& stage, std::int32_t microbatch, const std::string& text) {
  failed_ = true;
  if (failure_.failed) return;
  const std::string where = "stage " + std::to_string(stage.spec.index) + ", microbatch " + std::to_string(microbatch);
  failure_ = {true, systemTimeNs(), config_.rankName + ", " + where + ": " + text};
  abandonGradSync(failure_.text);
}

void Executor::abandonGradSync(const std::string& reason) {
  if (!program_.hasBackward) return;
  for (Stage& stage : stages_) {
    if (stage.spec.abandonGradSync) stage.spec.abandonGradSync(reason);
  }
}

std::string Executor::currentError() const {
  if (config_.describeError) return config_.describeError();
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

Status Executor::transportBroke(const std::string& during) {
  broken_ =
      Status(StatusCode::kPeerFailed, config_.rankName + ", during " + during + ": communication failed (" +
                                          currentError() + "); the pipeline cannot be used again with this group");
  abandonGradSync(broken_.toString());
  return broken_;
}

double Executor::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
}

}  // namespace farandole::pipeline
