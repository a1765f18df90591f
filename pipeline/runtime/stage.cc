#include "pipeline/runtime/stage.h"

#include <algorithm>

namespace farandole::pipeline {

void Transfer::wait() {
  if (hasHeader) header.wait();
  for (Message& message : messages) message.wait();
}

void Transfer::waitHeader() {
  if (hasHeader) header.wait();
}

bool Transfer::isDone() const {
  return (!hasHeader || header.isDone()) && std::ranges::all_of(messages, &Message::isDone);
}

void Transfer::releaseTensors() {
  wait();
  for (Message& message : messages) message.tensor[0].reset();
}

void Transfer::release() {
  header.release();
  hasHeader = false;
  for (Message& message : messages) message.release();
  posted = false;
}

bool MicrobatchSlot::isPacketMissing() const {
  std::size_t end = 0;
  for (const IncomingEdge& edge : into) {
    end += edge.metas.size();
    if (!edge.metas.empty() && edge.metas.back().isPacket && isPacketOfFailure(inputs[end - 1])) return true;
  }
  return false;
}

Stage::Stage(StageSpec given, const ProgramStage& program, int numMicrobatches)
    : spec(std::move(given)), program(program), slots(numMicrobatches) {
  for (MicrobatchSlot& slot : slots) {
    slot.into.resize(program.into.size());
    slot.outOf.resize(program.outOf.size());
  }
  for (const StageLink& link : program.outOf) {
    const auto found = spec.outputsTo.find(link.other);
    selected_.push_back(found == spec.outputsTo.end() ? nullptr : &found->second);
  }
}

std::span<const std::int32_t> Stage::outputsOver(std::size_t link, std::size_t numOutputs) {
  if (selected_[link] != nullptr) return *selected_[link];
  while (all_.size() < numOutputs) all_.push_back(static_cast<std::int32_t>(all_.size()));
  return {all_.data(), numOutputs};
}

void Stage::takeDeclaredShapes(bool hasBackward) {
  const auto differentiable = [hasBackward](std::vector<TensorMeta> metas) {
    for (TensorMeta& meta : metas)
      meta.requiresGrad = hasBackward && (at::isFloatingType(meta.dtype) || at::isComplexType(meta.dtype));
    return metas;
  };
  for (MicrobatchSlot& slot : slots) {
    for (IncomingEdge& edge : slot.into) edge.metas = differentiable(*spec.declaredInputs);
    slot.outputsKnown = !slot.outOf.empty();
    if (slot.outputsKnown) slot.outputMetas = differentiable(*spec.declaredOutputs);
  }
}

void Stage::reset(bool shapes) {
  for (MicrobatchSlot& slot : slots) {
    for (IncomingEdge& edge : slot.into) {
      edge.receiveActivation.release();
      edge.sendGradient.release();
      edge.isPoisoned = false;
    }
    for (OutgoingEdge& edge : slot.outOf) {
      edge.sendActivation.release();
      edge.receiveGradient.release();
      edge.outputs.clear();
      edge.grads.clear();
    }
    slot.inputs.clear();
    slot.inputGradients.clear();
    slot.roots.clear();
    slot.outputGrads.clear();
    slot.deferred = {};
    slot.deferredWeight = nullptr;
    slot.hookedOps.clear();
    slot.outputPoisoned = false;
    if (shapes) slot.outputsKnown = false;
  }
  if (shapes) savesThroughHooks = isBackwardWhole = false;
}

}  // namespace farandole::pipeline
