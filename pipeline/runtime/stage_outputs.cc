#include "pipeline/runtime/stage_outputs.h"

#include <map>
#include <string>

#include "pipeline/runtime/shape_exchange.h"

namespace farandole::pipeline {

namespace {

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

bool match(const std::vector<TensorMeta>& metas, const std::vector<at::Tensor>& tensors, bool hasPacket) {
  bool same = metas.size() == tensors.size() && endsWithPacket(metas) == hasPacket;
  for (std::size_t i = 0; same && i < tensors.size(); ++i) same = metas[i].matches(tensors[i]);
  return same;
}

}  // namespace

void awaitCollective(at::Tensor& tensor) {
  if (tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python)) tensor = tensor.clone();
}

bool endsWithPacket(const std::vector<TensorMeta>& metas) { return !metas.empty() && metas.back().isPacket; }

Status checkOutputs(const StageSpec& spec, at::Device device, MicrobatchSlot& slot, std::vector<at::Tensor>& outputs) {
  const bool hasPacket = spec.packets && spec.packets->returned;
  for (at::Tensor& output : outputs) awaitCollective(output);
  FARANDOLE_RETURN_IF_ERROR(checkSendable(outputs, device, hasPacket));
  if (!slot.outputsKnown) {
    // Room to grow: what is in a packet may differ from step to step.
    if (hasPacket) static_cast<void>(fitPacket(outputs.back(), 2 * outputs.back().numel()));
    slot.outputMetas = metasOf(outputs);
    if (hasPacket) slot.outputMetas.back().isPacket = true;
    FARANDOLE_RETURN_IF_ERROR(encodeHeader(slot.outputMetas).status());
    FARANDOLE_RETURN_IF_ERROR(checkSelection(spec.outputsTo, outputs.size(), hasPacket));
    return spec.declaredOutputs ? checkDeclared("outputs", *spec.declaredOutputs, slot.outputMetas) : Status::ok();
  }
  if (hasPacket && endsWithPacket(slot.outputMetas)) {
    FARANDOLE_RETURN_IF_ERROR(fitPacket(outputs.back(), slot.outputMetas.back().sizes[0]));
  }
  if (match(slot.outputMetas, outputs, hasPacket)) return Status::ok();
  std::vector<TensorMeta> metas = metasOf(outputs);
  if (hasPacket) metas.back().isPacket = true;
  return Status::invalidArgument("the outputs are " + toString(metas) + ", expected " + toString(slot.outputMetas) +
                                 " as in the step before, whose inputs had the same shapes");
}

}  // namespace farandole::pipeline
