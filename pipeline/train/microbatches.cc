#include "pipeline/train/microbatches.h"

#include <string>
#include <utility>

#include "pipeline/runtime/executor_config.h"

namespace farandole::pipeline {

namespace {

std::string place(const std::string& name, std::size_t index) { return name + "[" + std::to_string(index) + "]"; }

Status checkTensor(const std::string& name, const at::Tensor& tensor, at::Device device) {
  if (!tensor.defined()) return Status::invalidArgument(name + " is undefined, expected a tensor");
  if (tensor.device() == device) return Status::ok();
  return Status::invalidArgument(name + " is on " + tensor.device().str() + ", expected " + device.str() +
                                 ", the schedule's device");
}

Status checkSplittable(const std::string& name, const at::Tensor& tensor, at::Device device, std::size_t count) {
  FARANDOLE_RETURN_IF_ERROR(checkTensor(name, tensor, device));
  if (tensor.dim() > 0 && tensor.size(0) >= static_cast<std::int64_t>(count)) return Status::ok();
  return Status::invalidArgument(
      name + " has " +
      (tensor.dim() == 0 ? "no dimension to split along" : std::to_string(tensor.size(0)) + " rows along dimension 0") +
      ", expected at least numMicrobatches = " + std::to_string(count));
}

Status checkCount(const std::string& name, std::size_t given, std::size_t expected) {
  if (given == expected) return Status::ok();
  return Status::invalidArgument(name + " has " + std::to_string(given) +
                                 " entries, expected numMicrobatches = " + std::to_string(expected));
}

Status refuseBoth(const std::string& whole, const std::string& parts) {
  return Status::invalidArgument(whole + " and " + parts + " were given, expected one of them");
}

}  // namespace

Status takeInputs(const Batch& batch, at::Device device, std::vector<std::vector<at::Tensor>>& into) {
  if (!batch.inputMicrobatches.empty()) {
    if (!batch.inputs.empty()) return refuseBoth("inputs", "inputMicrobatches");
    FARANDOLE_RETURN_IF_ERROR(checkCount("inputMicrobatches", batch.inputMicrobatches.size(), into.size()));
    for (std::size_t i = 0; i < into.size(); ++i) {
      const std::string name = place("inputMicrobatches", i);
      if (batch.inputMicrobatches[i].empty()) {
        return Status::invalidArgument(name + " is empty, expected the arguments of the first stage");
      }
      for (std::size_t k = 0; k < batch.inputMicrobatches[i].size(); ++k) {
        FARANDOLE_RETURN_IF_ERROR(checkTensor(place(name, k), batch.inputMicrobatches[i][k], device));
      }
      into[i] = batch.inputMicrobatches[i];
    }
    return Status::ok();
  }
  if (batch.inputs.empty())
    return Status::invalidArgument("inputs is empty, expected the arguments of the first stage");
  for (std::size_t k = 0; k < batch.inputs.size(); ++k) {
    FARANDOLE_RETURN_IF_ERROR(checkSplittable(place("inputs", k), batch.inputs[k], device, into.size()));
    std::vector<at::Tensor> parts = batch.inputs[k].tensor_split(static_cast<std::int64_t>(into.size()));
    for (std::size_t i = 0; i < into.size(); ++i) into[i].push_back(std::move(parts[i]));
  }
  return Status::ok();
}

Status takeTargets(const Batch& batch, at::Device device, std::vector<at::Tensor>& into) {
  if (!batch.targetMicrobatches.empty()) {
    if (batch.target.defined()) return refuseBoth("target", "targetMicrobatches");
    FARANDOLE_RETURN_IF_ERROR(checkCount("targetMicrobatches", batch.targetMicrobatches.size(), into.size()));
    for (std::size_t i = 0; i < into.size(); ++i) {
      FARANDOLE_RETURN_IF_ERROR(checkTensor(place("targetMicrobatches", i), batch.targetMicrobatches[i], device));
      into[i] = batch.targetMicrobatches[i];
    }
    return Status::ok();
  }
  if (!batch.target.defined()) return Status::ok();
  FARANDOLE_RETURN_IF_ERROR(checkSplittable("target", batch.target, device, into.size()));
  std::vector<at::Tensor> parts = batch.target.tensor_split(static_cast<std::int64_t>(into.size()));
  for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::move(parts[i]);
  return Status::ok();
}

Result<std::vector<at::Tensor>> mergeOutputs(const std::vector<std::vector<at::Tensor>>& microbatches) {
  std::vector<at::Tensor> merged;
  if (microbatches.empty()) return merged;
  for (const std::vector<at::Tensor>& outputs : microbatches) {
    if (outputs.size() == microbatches[0].size()) continue;
    return Status::invalidArgument("the last stage returned " + std::to_string(microbatches[0].size()) + " and " +
                                   std::to_string(outputs.size()) +
                                   " tensors, expected as many for every microbatch, to be merged");
  }
  try {
    for (std::size_t k = 0; k < microbatches[0].size(); ++k) {
      std::vector<at::Tensor> parts;
      parts.reserve(microbatches.size());
      for (const std::vector<at::Tensor>& outputs : microbatches) parts.push_back(outputs[k]);
      merged.push_back(at::cat(parts));
    }
  } catch (...) {
    return Status::invalidArgument("the outputs of the microbatches cannot be merged: " + describeCurrentError());
  }
  return merged;
}

}  // namespace farandole::pipeline
