#include "pipeline/runtime/stage_compute.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <utility>

#include "pipeline/runtime/input_gradient.h"
#include "pipeline/runtime/saved_tensor_hooks.h"
#include "pipeline/runtime/shape_exchange.h"

namespace farandole::pipeline {

namespace {

// What an asynchronous functional collective returns stands for a tensor: a copy waits for that.
void takeOwnMemory(at::Tensor& tensor) {
  if (tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python)) tensor = tensor.clone();
}

// What a stage may send: defined, dense, on its device, but for a packet at the end.
Status checkSendable(const std::vector<at::Tensor>& outputs, at::Device stage, bool hasPacket) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& output = outputs[i];
    const at::Device device = hasPacket && i + 1 == outputs.size() ? at::Device(at::kCPU) : stage;
    if (!output.defined() || output.layout() != at::kStrided || output.is_nested() || output.device() != device) {
      return Status::invalidArgument("output " + std::to_string(i) + " is " +
                                     (output.defined() ? (output.is_nested() ? "a nested " : "a ") +
                                                             std::string(c10::str(output.layout())) + " tensor on " +
                                                             output.device().str()
                                                       : std::string("undefined")) +
                                     ", expected a dense tensor on the stage's device " + stage.str());
    }
    if (output.key_set().has(c10::DispatchKey::Python)) {
      return Status::invalidArgument("output " + std::to_string(i) +
                                     " stands for other tensors, as a DTensor does, expected a plain tensor");
    }
  }
  return Status::ok();
}

Status checkSelection(const std::map<std::int32_t, std::vector<std::int32_t>>& outputsTo, std::size_t numOutputs,
                      bool hasPacket) {
  for (const auto& [stage, outputs] : outputsTo) {
    if (hasPacket) {
      return Status::invalidArgument(
          "the module returned more than tensors, expected a tensor or a tuple of tensors: "
          "only some of the outputs go to stage " +
          std::to_string(stage));
    }
    for (const std::int32_t output : outputs) {
      if (output >= 0 && static_cast<std::size_t>(output) < numOutputs) continue;
      return Status::invalidArgument("the module returned " + std::to_string(numOutputs) +
                                     " tensors, expected more: output " + std::to_string(output) + " goes to stage " +
                                     std::to_string(stage));
    }
  }
  return Status::ok();
}

std::vector<TensorMeta> metasOf(const std::vector<at::Tensor>& tensors) {
  std::vector<TensorMeta> metas;
  metas.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) metas.push_back(TensorMeta::of(tensor));
  return metas;
}

bool endsWithPacket(const std::vector<TensorMeta>& metas) { return !metas.empty() && metas.back().isPacket; }

void notePackets(const MicrobatchSlot& slot, PacketNotes& notes) {
  notes.returned = false;
  notes.inputs.clear();
  if (std::ranges::none_of(slot.into, [](const IncomingEdge& edge) { return endsWithPacket(edge.metas); })) return;
  for (const IncomingEdge& edge : slot.into) notes.inputs.push_back({edge.metas.size(), endsWithPacket(edge.metas)});
}

bool match(const std::vector<TensorMeta>& metas, const std::vector<at::Tensor>& tensors, bool hasPacket) {
  bool same = metas.size() == tensors.size() && endsWithPacket(metas) == hasPacket;
  for (std::size_t i = 0; same && i < tensors.size(); ++i) same = metas[i].matches(tensors[i]);
  return same;
}

bool isFinite(const at::Tensor& tensor) { return at::isfinite(tensor).all().item<bool>(); }

const char* nameOf(StepOp op) {
  switch (op) {
    case StepOp::kBackwardInput: return "backward for the inputs: ";
    case StepOp::kBackwardWeight: return "backward for the weights: ";
    default: return "backward: ";
  }
}

}  // namespace

void StageCompute::beginStep(std::vector<Stage>& stages, std::span<const double> lossScales) {
  lossScales_ = lossScales;
  // What a step that failed has left.
  outputs_.clear();
  split_.clear();
  if (!program_.hasBackward) return;
  for (Stage& stage : stages) {
    stage.isSplit = false;
    if (!stage.spec.requireGradSync) continue;
    try {
      stage.spec.requireGradSync(false);
    } catch (...) {
      failure_.fail(stage, 0, "switching gradient reduction: " + config_.describeError());
    }
  }
}

void StageCompute::forward(Stage& stage, std::int32_t microbatch, bool learning) {
  outputs_.clear();
  if (failure_.isFailed()) return;
  MicrobatchSlot& slot = stage.slots[microbatch];
  if (learning && stage.spec.declaredInputs && !stage.isFirst()) {
    std::vector<TensorMeta> metas;
    for (const IncomingEdge& edge : slot.into) metas.insert(metas.end(), edge.metas.begin(), edge.metas.end());
    if (Status status = checkDeclared("inputs", *stage.spec.declaredInputs, metas); !status.isOk()) {
      return failure_.fail(stage, microbatch, std::string(status.message()));
    }
  }
  // The first stage has no gradients of inputs to split from.
  const bool watches = stage.program.splitsBackward && !stage.isFirst() && !stage.isNeverSplit() &&
                       (learning || stage.savesThroughHooks);
  if (!watches) return runForward(stage, microbatch);
  {
    const SavedTensorHookWatch watch(slot.hookedOps);
    runForward(stage, microbatch);
  }
  stage.savesThroughHooks = stage.savesThroughHooks || !slot.hookedOps.empty();
}

void StageCompute::runForward(Stage& stage, std::int32_t microbatch) {
  if (stage.spec.packets) notePackets(stage.slots[microbatch], *stage.spec.packets);
  try {
    stage.spec.forward(microbatch, stage.slots[microbatch].inputs, outputs_);
  } catch (...) {
    failure_.fail(stage, microbatch, "forward: " + config_.describeError());
  }
}

void StageCompute::handOver(Stage& stage, std::int32_t microbatch) {
  MicrobatchSlot& slot = stage.slots[microbatch];
  try {
    stage.isLast() ? takeLoss(stage, microbatch) : checkOutputs(stage, microbatch);
  } catch (...) {
    failure_.fail(stage, microbatch, "what the module returned: " + config_.describeError());
  }
  if (!stage.isLast()) {
    if (failure_.isFailed()) {
      outputs_.clear();
      slot.outputPoisoned = !slot.outputsKnown;
      if (!slot.outputPoisoned) {
        for (const TensorMeta& meta : slot.outputMetas) outputs_.push_back(meta.zeros(config_.device));
      }
    } else if (program_.hasBackward) {
      for (std::size_t link = 0; link < slot.outOf.size(); ++link) {
        for (const std::int32_t i : stage.outputsOver(link, outputs_.size())) {
          if (outputs_[i].requires_grad()) slot.roots.push_back(torch::autograd::impl::gradient_edge(outputs_[i]));
        }
      }
    }
    traffic_.setOutputs(stage, microbatch, outputs_);
  }
  outputs_.clear();
  if (!program_.hasBackward) traffic_.releaseInputs(slot);
}

void StageCompute::takeLoss(Stage& stage, std::int32_t microbatch) {
  if (failure_.isFailed() || !program_.hasBackward) return;
  const at::Tensor& loss = outputs_.empty() ? at::Tensor() : outputs_[0];
  if (outputs_.size() != 1 || !loss.defined() || loss.numel() != 1 || !loss.requires_grad()) {
    return failure_.fail(
        stage, microbatch,
        "the loss is " +
            (loss.defined() ? toString(TensorMeta::of(loss)) : std::to_string(outputs_.size()) + " tensors") +
            ", expected a tensor of one element that requires grad");
  }
  if (config_.checksForNan && !isFinite(loss)) {
    return failure_.fail(stage, microbatch, "the loss is NaN or infinite, expected a finite number");
  }
  seedLoss(stage.slots[microbatch], loss, lossScales_.empty() ? config_.lossScale : lossScales_[microbatch]);
}

void StageCompute::seedLoss(MicrobatchSlot& slot, const at::Tensor& loss, double scale) {
  at::Tensor& seed = slot.lossSeed;
  const bool fits = seed.defined() && seed.scalar_type() == loss.scalar_type() && seed.sizes() == loss.sizes();
  // A hook may have kept it, or a parameter got its memory for a gradient.
  const bool isShared = fits && (seed.use_count() > 1 || seed.storage().use_count() > 1);
  if (!fits || isShared) {
    seed = at::full(loss.sizes(), scale, loss.options().requires_grad(false));
  } else if (scale != slot.lossScale || seed._version() != slot.lossSeedVersion) {
    seed.fill_(scale);
  }
  slot.lossScale = scale;
  slot.lossSeedVersion = seed._version();
  slot.roots.push_back(torch::autograd::impl::gradient_edge(loss));
  slot.outputGrads.push_back(seed);
}

void StageCompute::checkOutputs(Stage& stage, std::int32_t microbatch) {
  MicrobatchSlot& slot = stage.slots[microbatch];
  if (failure_.isFailed()) return;
  const bool hasPacket = stage.spec.packets && stage.spec.packets->returned;
  for (at::Tensor& output : outputs_) takeOwnMemory(output);
  if (Status status = checkSendable(outputs_, config_.device, hasPacket); !status.isOk()) {
    return failure_.fail(stage, microbatch, std::string(status.message()));
  }
  if (!slot.outputsKnown) {
    // Room to grow: what is in a packet may differ from step to step.
    if (hasPacket) static_cast<void>(fitPacket(outputs_.back(), 2 * outputs_.back().numel()));
    slot.outputMetas = metasOf(outputs_);
    if (hasPacket) slot.outputMetas.back().isPacket = true;
    Status fits = encodeHeader(slot.outputMetas).status();
    if (fits.isOk()) fits = checkSelection(stage.spec.outputsTo, outputs_.size(), hasPacket);
    if (fits.isOk() && stage.spec.declaredOutputs) {
      fits = checkDeclared("outputs", *stage.spec.declaredOutputs, slot.outputMetas);
    }
    if (!fits.isOk()) failure_.fail(stage, microbatch, std::string(fits.message()));
    slot.outputsKnown = fits.isOk();
    return;
  }
  if (hasPacket && endsWithPacket(slot.outputMetas)) {
    Status fits = fitPacket(outputs_.back(), slot.outputMetas.back().sizes[0]);
    if (!fits.isOk()) return failure_.fail(stage, microbatch, std::string(fits.message()));
  }
  if (!match(slot.outputMetas, outputs_, hasPacket)) {
    std::vector<TensorMeta> metas = metasOf(outputs_);
    if (hasPacket) metas.back().isPacket = true;
    failure_.fail(stage, microbatch,
                  "the outputs are " + toString(metas) + ", expected " + toString(slot.outputMetas) +
                      " as in the step before, whose inputs had the same shapes");
  }
}

void StageCompute::backward(Stage& stage, const Step& step) {
  MicrobatchSlot& slot = stage.slots[step.microbatch];
  if (!failure_.isFailed()) {
    try {
      compute(stage, step);
    } catch (...) {
      failure_.fail(stage, step.microbatch, nameOf(step.op) + config_.describeError());
    }
  }
  if (failure_.isFailed()) {
    slot.deferred = {};
    slot.deferredWeight = nullptr;
  }
  if (step.op == StepOp::kBackwardWeight) return;
  slot.roots.clear();
  returnInputGrads(stage, step.microbatch);
  traffic_.releaseInputs(slot);
}

void StageCompute::compute(Stage& stage, const Step& step) {
  MicrobatchSlot& slot = stage.slots[step.microbatch];
  if (step.op == StepOp::kBackwardInput && !stage.isInputBackwardWhole()) {
    split_.analyze(slot.roots, slot.inputGradients, slot.hookedOps);
    if (split_.unsplittable() != nullptr) takeUnsplittable(stage);
    if (stage.isBackwardWhole) split_.clear();
  }
  const bool isLast = stage.isInputBackwardWhole() ? step.lastInputBackward : step.lastBackward;
  if (stage.spec.aroundBackward) stage.spec.aroundBackward(step.microbatch, true);
  if (isLast && stage.spec.requireGradSync) stage.spec.requireGradSync(true);
  if (step.op == StepOp::kBackwardWeight) {
    runWeight(slot);
  } else if (step.op == StepOp::kBackwardInput && !stage.isInputBackwardWhole()) {
    split_.runInput(slot.roots, slot.outputGrads, slot.deferred);
    stage.isSplit = true;
  } else if (!slot.roots.empty()) {
    runBackward(slot.roots, slot.outputGrads);
  }
  if (stage.spec.buildWeightBackward && step.op != StepOp::kBackwardWeight) {
    slot.deferredWeight = stage.spec.buildWeightBackward();
    if (step.op == StepOp::kBackward) runWeight(slot);
  }
  if (isLast && stage.spec.finishGradSync) stage.spec.finishGradSync();
  if (stage.spec.aroundBackward) stage.spec.aroundBackward(step.microbatch, false);
}

void StageCompute::runWeight(MicrobatchSlot& slot) {
  if (slot.deferredWeight) return std::exchange(slot.deferredWeight, nullptr)();
  SplitBackward::runWeight(slot.deferred);
}

// A reduction of gradients begins with one last backward; then weights may not get theirs in both halves.
void StageCompute::takeUnsplittable(Stage& stage) {
  const bool isReduced = stage.spec.requireGradSync && !stage.spec.finishGradSync;
  if (isReduced && stage.isSplit) {
    throw std::runtime_error("the backward of " + split_.unsplittable()->name() +
                             " cannot be split, those of the microbatches before were; expected that of all or none in "
                             "a stage whose gradients are reduced between replicas");
  }
  stage.isBackwardWhole = isReduced;
  if (std::exchange(stage.isUnsplittableTold, true)) return;
  const std::string text = "stage " + std::to_string(stage.spec.index) + ": the backward of " +
                           split_.unsplittable()->name() + " cannot be split without computing it twice; " +
                           (isReduced ? "all weights of the stage" : "the weights that it feeds") +
                           " get their gradients together with the inputs";
  config_.notify(text);
}

void StageCompute::returnInputGrads(Stage& stage, std::int32_t microbatch) {
  MicrobatchSlot& slot = stage.slots[microbatch];
  if (stage.isFirst()) return;
  grads_.clear();
  for (const IncomingEdge& edge : slot.into) {
    if (edge.isPoisoned) continue;
    for (const TensorMeta& meta : edge.metas) {
      at::Tensor grad;
      if (meta.requiresGrad && !failure_.isFailed()) grad = takeInputGradient(slot.inputGradients[grads_.size()]);
      takeOwnMemory(grad);
      if (config_.checksForNan && grad.defined() && !isFinite(grad)) {
        failure_.fail(stage, microbatch,
                      "backward: the gradient of input " + std::to_string(grads_.size()) +
                          " is NaN or infinite somewhere, expected finite numbers");
        grad.reset();
      }
      if (meta.requiresGrad && !grad.defined()) grad = meta.zeros(config_.device);
      // Autograd may have given the same memory to a parameter, whose gradient later backwards add to.
      if (grad.defined() && grad.has_storage() && grad.storage().use_count() > 1) grad = grad.clone();
      grads_.push_back(std::move(grad));
    }
  }
  traffic_.setInputGrads(stage, microbatch, grads_);
  grads_.clear();
}

}  // namespace farandole::pipeline
