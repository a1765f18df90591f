#include "pipeline/runtime/stage_compute.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <utility>

#include "pipeline/runtime/input_gradient.h"
#include "pipeline/runtime/saved_tensor_hooks.h"
#include "pipeline/runtime/shape_exchange.h"
#include "pipeline/runtime/stage_outputs.h"

namespace farandole::pipeline {

namespace {

void notePackets(const MicrobatchSlot& slot, PacketNotes& notes) {
  notes.returned = false;
  notes.inputs.clear();
  if (std::ranges::none_of(slot.into, [](const IncomingEdge& edge) { return endsWithPacket(edge.metas); })) return;
  for (const IncomingEdge& edge : slot.into) notes.inputs.push_back({edge.metas.size(), endsWithPacket(edge.metas)});
}

bool isFinite(const at::Tensor& tensor) { return at::isfinite(tensor).all().item<bool>(); }

const char* nameOf(InstructionOp op) {
  switch (op) {
    case InstructionOp::kBackwardInput: return "backward for the inputs: ";
    case InstructionOp::kBackwardWeight: return "backward for the weights: ";
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
    stage.isSplit = stage.hasBegun = false;
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
  // One forward of every step is watched: checkpoints may have been switched on since shapes were learned.
  const bool begins = !std::exchange(stage.hasBegun, true);
  const bool watches = stage.program.splitsBackward && !stage.isFirst() && !stage.isNeverSplit() &&
                       (learning || begins || stage.savesThroughHooks);
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
  if (!failure_.isFailed()) {
    try {
      stage.isLast() ? takeLoss(stage, microbatch) : giveOutputs(stage, microbatch);
    } catch (...) {
      failure_.fail(stage, microbatch, "what the module returned: " + config_.describeError());
    }
  }
  if (failure_.isFailed() && !stage.isLast()) giveZeros(stage, microbatch);
  outputs_.clear();
  if (!program_.hasBackward) traffic_.releaseInputs(slot);
}

void StageCompute::giveOutputs(Stage& stage, std::int32_t microbatch) {
  MicrobatchSlot& slot = stage.slots[microbatch];
  if (Status status = checkOutputs(stage.spec, config_.device, slot, outputs_); !status.isOk()) {
    return failure_.fail(stage, microbatch, std::string(status.message()));
  }
  for (std::size_t link = 0; program_.hasBackward && link < slot.outOf.size(); ++link) {
    for (const std::int32_t i : stage.outputsOver(link, outputs_.size())) {
      if (outputs_[i].requires_grad()) slot.roots.push_back(torch::autograd::impl::gradient_edge(outputs_[i]));
    }
  }
  traffic_.setOutputs(stage, microbatch, outputs_);
  slot.outputsKnown = true;  // not before: zeros of shapes that could not be handed over may have no room either
}

// What others wait for in a step that failed; where they do not know the shapes either, the header says so.
void StageCompute::giveZeros(Stage& stage, std::int32_t microbatch) {
  MicrobatchSlot& slot = stage.slots[microbatch];
  slot.roots.clear();
  outputs_.clear();
  slot.outputPoisoned = !slot.outputsKnown;
  if (!slot.outputPoisoned) {
    for (const TensorMeta& meta : slot.outputMetas) outputs_.push_back(meta.zeros(config_.device));
  }
  traffic_.setOutputs(stage, microbatch, outputs_);
}

void StageCompute::takeLoss(Stage& stage, std::int32_t microbatch) {
  if (!program_.hasBackward) return;
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

void StageCompute::backward(Stage& stage, const Instruction& instruction) {
  MicrobatchSlot& slot = stage.slots[instruction.microbatch];
  if (!failure_.isFailed()) {
    try {
      compute(stage, instruction);
    } catch (...) {
      failure_.fail(stage, instruction.microbatch, nameOf(instruction.op) + config_.describeError());
    }
  }
  if (failure_.isFailed()) {
    slot.deferred = {};
    slot.deferredWeight = nullptr;
  }
  if (instruction.op == InstructionOp::kBackwardWeight) return;
  slot.roots.clear();
  returnInputGrads(stage, instruction.microbatch);
  traffic_.releaseInputs(slot);
}

void StageCompute::compute(Stage& stage, const Instruction& instruction) {
  MicrobatchSlot& slot = stage.slots[instruction.microbatch];
  if (instruction.op == InstructionOp::kBackwardInput && !stage.isInputBackwardWhole()) {
    split_.analyze(slot.roots, slot.inputGradients, slot.hookedOps);
    if (split_.unsplittable() != nullptr) takeUnsplittable(stage);
    if (stage.isBackwardWhole) split_.clear();
  }
  const bool isLast = stage.isInputBackwardWhole() ? instruction.lastInputBackward : instruction.lastBackward;
  if (stage.spec.aroundBackward) stage.spec.aroundBackward(instruction.microbatch, true);
  if (isLast && stage.spec.requireGradSync) stage.spec.requireGradSync(true);
  if (instruction.op == InstructionOp::kBackwardWeight) {
    runWeight(slot);
  } else if (instruction.op == InstructionOp::kBackwardInput && !stage.isInputBackwardWhole()) {
    split_.runInput(slot.roots, slot.outputGrads, slot.deferred);
    stage.isSplit = true;
  } else if (!slot.roots.empty()) {
    runBackward(slot.roots, slot.outputGrads);
  }
  if (stage.spec.buildWeightBackward && instruction.op != InstructionOp::kBackwardWeight) {
    slot.deferredWeight = stage.spec.buildWeightBackward();
    if (instruction.op == InstructionOp::kBackward) runWeight(slot);
  }
  if (isLast && stage.spec.finishGradSync) stage.spec.finishGradSync();
  if (stage.spec.aroundBackward) stage.spec.aroundBackward(instruction.microbatch, false);
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
      at::Tensor grad = meta.requiresGrad ? takeInputGrad(stage, microbatch, grads_.size()) : at::Tensor();
      if (meta.requiresGrad && !grad.defined()) grad = meta.zeros(config_.device);
      grads_.push_back(std::move(grad));
    }
  }
  traffic_.setInputGrads(stage, microbatch, grads_);
  grads_.clear();
}

at::Tensor StageCompute::takeInputGrad(const Stage& stage, std::int32_t microbatch, std::size_t input) {
  if (failure_.isFailed()) return {};
  const auto name = [input] { return "backward: the gradient of input " + std::to_string(input); };
  try {
    at::Tensor grad = takeInputGradient(stage.slots[microbatch].inputGradients[input]);
    awaitCollective(grad);
    if (config_.checksForNan && grad.defined() && !isFinite(grad)) {
      failure_.fail(stage, microbatch, name() + " is NaN or infinite somewhere, expected finite numbers");
      return {};
    }
    // Autograd may have given the same memory to a parameter, whose gradient later backwards add to.
    const bool isShared = grad.defined() && grad.has_storage() && grad.storage().use_count() > 1;
    return isShared ? grad.clone() : grad;
  } catch (...) {
    failure_.fail(stage, microbatch, name() + ": " + config_.describeError());
    return {};
  }
}

}  // namespace farandole::pipeline
