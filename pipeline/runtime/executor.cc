#include "pipeline/runtime/executor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

namespace farandole::pipeline {

Result<std::unique_ptr<Executor>> Executor::create(const Plan& lowered, int rank,
                                                   const c10::intrusive_ptr<c10d::Backend>& backend,
                                                   ExecutorConfig config) {
  Result<Program> program = compileProgram(lowered, rank);
  if (!program) return program.status();
  if (lowered.numRanks() > 1 && !backend) {
    return Status::invalidArgument("backend is null, expected one that reaches " + std::to_string(lowered.numRanks()) +
                                   " ranks");
  }
  if (lowered.numRanks() > 1 && !config.device.is_cpu() && !config.deviceBackend) {
    return Status::invalidArgument("deviceBackend is null, expected one that sends tensors on " + config.device.str());
  }
  bool same = config.stages.size() == program->stages.size();
  for (std::size_t i = 0; same && i < config.stages.size(); ++i) {
    same = config.stages[i].index == program->stages[i].index && config.stages[i].forward;
  }
  if (!same) {
    return Status::invalidArgument("stages are not those that the plan places on rank " + std::to_string(rank) +
                                   ", in ascending order and with a forward function each");
  }
  for (std::size_t i = 0; config.areShapesDeclared && i < config.stages.size(); ++i) {
    const ProgramStage& stage = program->stages[i];
    const StageSpec& spec = config.stages[i];
    if (stage.into.size() > 1 || stage.outOf.size() > 1 || (!stage.into.empty() && !spec.declaredInputs) ||
        (!stage.outOf.empty() && !spec.declaredOutputs)) {
      return Status::invalidArgument("the shapes of stage " + std::to_string(stage.index) +
                                     " are not all declared, expected a chain of stages that declare them");
    }
  }
  program->digest ^= config.alike * 0x9e3779b97f4a7c15;  // spread over all bits
  if (config.hasOneQueue) {
    program->digest ^= 0xc2b2ae3d27d4eb4f;
    config.description += ", with one queue for its messages";
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
      traffic_(program_, stages_, makeChannel(backend, config_.deviceBackend, config_.hasOneQueue), config_.device),
      failure_(config_.rankName.empty() ? "rank " + std::to_string(program_.rank) : config_.rankName, stages_,
               program_.hasBackward),
      compute_(program_, config_, traffic_, failure_),
      deviceTimes_(config_.device) {
  for (std::size_t i = 0; i < config_.stages.size(); ++i) {
    stages_.emplace_back(std::move(config_.stages[i]), program_.stages[i], program_.numMicrobatches);
  }
  trace_.instructions.reserve(program_.instructions.size());
  if (!config_.areShapesDeclared) return;
  for (Stage& stage : stages_) stage.takeDeclaredShapes(program_.hasBackward);
  learned_ = true;
}

Status Executor::step(bool relearn, std::span<const double> lossScales, bool isCaptured) {
  if (!broken_.isOk()) return broken_;
  isCaptured_ = isCaptured;
  // What a graph works on is its own: nothing that other steps use, and may let go, and nothing that they go on with.
  if (isCaptured) releaseKept();
  Status status = runStep(relearn, lossScales);
  if (isCaptured) releaseKept();
  isCaptured_ = false;
  return status;
}

void Executor::releaseKept() {
  traffic_.releaseBuffers();
  for (Stage& stage : stages_) {
    for (MicrobatchSlot& slot : stage.slots) slot.lossSeed.reset();
  }
}

Status Executor::runStep(bool relearn, std::span<const double> lossScales) {
  if (!lossScales.empty() && lossScales.size() != static_cast<std::size_t>(program_.numMicrobatches)) {
    return refuse("lossScales has " + std::to_string(lossScales.size()) + " entries, expected " +
                  std::to_string(program_.numMicrobatches) + ", one for each microbatch");
  }
  began_ = std::chrono::steady_clock::now();
  trace_.instructions.clear();
  trace_.computeSeconds = trace_.seconds = 0;
  agreed_ = false;
  isDeviceTimed_ = timesDevice_ && !isCaptured_ && !config_.device.is_cpu();
  failure_.beginStep();
  const at::AutoGradMode gradMode(program_.hasBackward);
  const c10::OptionalDeviceGuard device(config_.device.is_cpu() ? std::nullopt : std::optional(config_.device));
  std::uint32_t at = 0;
  try {
    const bool relearns = relearn || !learned_ || (isCaptured_ && !hasRunSteadily_);
    agreement_.postVote({false, relearns, isCaptured_ ? ~program_.digest : program_.digest});
    compute_.beginStep(stages_, lossScales);
    if (Status status = replay(); !status.isOk()) return status;
    at = static_cast<std::uint32_t>(program_.instructions.size());
    return conclude();
  } catch (...) {
    at = std::max<std::uint32_t>(at, static_cast<std::uint32_t>(trace_.instructions.size()));
    if (!agreed_) return transportBroke("the beginning of the step");
    return transportBroke(at < program_.labels.size() ? "action " + program_.labels[at] : "the end of the step");
  }
}

Status Executor::refuse(std::string reason) {
  if (!broken_.isOk()) return broken_;
  failure_.beginStep();
  failure_.refuse(systemTimeNs(), ": " + std::move(reason));
  return voteOnly({true, true, program_.digest});
}

Status Executor::confirm() {
  if (!broken_.isOk()) return broken_;
  failure_.beginStep();
  return voteOnly({false, false, program_.digest});
}

Status Executor::voteOnly(const StepAgreement::Vote& vote) {
  agreed_ = false;
  trace_ = {};
  try {
    agreement_.postVote(vote);
    return agree();
  } catch (...) {
    return transportBroke("the beginning of a step");
  }
}

Status Executor::agree() {
  if (agreed_) return Status::ok();
  const StepAgreement::Outcome outcome = agreement_.awaitVote();
  agreed_ = true;
  const bool differs = !outcome.refused && !outcome.samePlan;  // who refuses may have no plan
  const bool isTooEarly = !outcome.refused && !differs && isCaptured_ && outcome.relearn;
  if (outcome.refused || differs || isTooEarly) {
    if (differs) failure_.refuse(0, " runs " + config_.description + (isCaptured_ ? ", captured in a graph" : ""));
    if (isTooEarly) {
      failure_.refuse(
          0,
          " captures a step in a graph, expected two steps with the same shapes outside of a graph before it: one "
          "learns shapes, the next one connects ranks");
    }
    const std::string text = describeFailures(agreement_.exchangeReports(failure_.report()));
    traffic_.reset(true);
    trace_ = {};
    learned_ = hasRunSteadily_ = false;
    return Status::invalidArgument((differs ? "the ranks do not run the same step: " : "the step cannot run: ") + text);
  }
  learning_ = outcome.relearn;
  traffic_.beginStep(learning_, isCaptured_);
  return Status::ok();
}

Status Executor::replay() {
  for (std::uint32_t i = 0; i < program_.instructions.size(); ++i) {
    const Instruction& instruction = program_.instructions[i];
    at::RecordFunction range(at::RecordScope::USER_SCOPE);
    if (range.isActive()) range.before("PP:" + program_.labels[i]);  // as torch's runtime names them
    TimedInstruction time{i};
    begin(time);
    switch (instruction.op) {
      case InstructionOp::kForward: FARANDOLE_RETURN_IF_ERROR(forward(instruction, time)); break;
      case InstructionOp::kBackward:
      case InstructionOp::kBackwardInput:
        traffic_.awaitGradients(stages_[instruction.stage], instruction.microbatch);
        [[fallthrough]];
      case InstructionOp::kBackwardWeight:
        begin(time);
        compute_.backward(stages_[instruction.stage], instruction);
        break;
      case InstructionOp::kPost:
        FARANDOLE_RETURN_IF_ERROR(agree());
        traffic_.post(instruction);
        break;
      case InstructionOp::kWaitSend: traffic_.waitSends(instruction); break;
    }
    if (instruction.op != InstructionOp::kForward) markEnd();
    time.end = now();
    trace_.instructions.push_back(time);
    if (isCompute(instruction.op)) trace_.computeSeconds += time.end - time.start;
  }
  return agree();
}

Status Executor::conclude() {
  traffic_.finishStep();
  const bool anyFailed = agreement_.anyFailed(failure_.report().failed);
  trace_.seconds = now();
  learned_ = !anyFailed;
  hasRunSteadily_ = learned_ && !learning_;
  if (!anyFailed) return Status::ok();
  const std::string text = describeFailures(agreement_.exchangeReports(failure_.report()));
  traffic_.reset(true);
  return Status::internal("the step failed, its gradients are undefined: " + text);
}

Status Executor::forward(const Instruction& instruction, TimedInstruction& time) {
  Stage& stage = stages_[instruction.stage];
  if (!stage.isFirst()) {
    FARANDOLE_RETURN_IF_ERROR(agree());
    if (Status status = traffic_.awaitActivations(stage, instruction.microbatch); !status.isOk()) {
      broken_ = status;  // what else is on the wire is unknown
      failure_.abandon(failure_.rankName() + ": " + status.toString());
      return status;
    }
    traffic_.releaseArrived(stage, instruction);
    const MicrobatchSlot& slot = stage.slots[instruction.microbatch];
    if (slot.isInputPoisoned() || slot.isPacketMissing()) failure_.stopAt(stage);
  }
  begin(time);
  compute_.forward(stage, instruction.microbatch, learning_);
  markEnd();
  if (!agreed_) {
    const double before = now();
    FARANDOLE_RETURN_IF_ERROR(agree());
    time.start += now() - before;
  }
  compute_.handOver(stage, instruction.microbatch);
  return Status::ok();
}

Status Executor::transportBroke(const std::string& during) {
  broken_ = Status(StatusCode::kPeerFailed, failure_.rankName() + ", during " + during + ": communication failed (" +
                                                config_.describeError() +
                                                "); the pipeline cannot be used again with this group");
  failure_.abandon(broken_.toString());
  return broken_;
}

std::optional<StepTrace> Executor::lastDeviceTrace() {
  const bool hasEnded = trace_.seconds > 0;
  if (!isDeviceTimed_ || !hasEnded || trace_.instructions.empty()) return std::nullopt;
  const c10::OptionalDeviceGuard device(config_.device);
  const std::vector<DeviceTimes::Clock::time_point> times = deviceTimes_.read(2 * trace_.instructions.size());
  const auto sinceBegin = [this](DeviceTimes::Clock::time_point time) {
    return std::chrono::duration<double>(time - began_).count();
  };
  StepTrace onDevice;
  for (std::size_t i = 0; i < trace_.instructions.size(); ++i) {
    const std::uint32_t instruction = trace_.instructions[i].instruction;
    const TimedInstruction time{instruction, sinceBegin(times[2 * i]), sinceBegin(times[2 * i + 1])};
    onDevice.instructions.push_back(time);
    if (isCompute(program_.instructions[instruction].op)) onDevice.computeSeconds += time.end - time.start;
  }
  onDevice.seconds = onDevice.instructions.back().end - onDevice.instructions.front().start;
  return onDevice;
}

void Executor::begin(TimedInstruction& time) {
  if (isDeviceTimed_) deviceTimes_.mark(2 * trace_.instructions.size());
  time.start = now();
}

void Executor::markEnd() {
  if (isDeviceTimed_) deviceTimes_.mark(2 * trace_.instructions.size() + 1);
}

double Executor::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
}

}  // namespace farandole::pipeline
