#include "pipeline/train/module_stage.h"

#include <c10/util/Exception.h>

#include <string>
#include <tuple>

namespace farandole::pipeline {

namespace {

void appendValue(torch::nn::AnyValue value, std::vector<at::Tensor>& outputs) {
  using Pair = std::tuple<at::Tensor, at::Tensor>;
  using Triple = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
  if (auto* tensor = value.try_get<at::Tensor>()) return detail::appendTensors(std::move(*tensor), outputs);
  if (auto* list = value.try_get<std::vector<at::Tensor>>()) return detail::appendTensors(std::move(*list), outputs);
  if (auto* pair = value.try_get<Pair>()) return detail::appendTensors(std::move(*pair), outputs);
  if (auto* triple = value.try_get<Triple>()) return detail::appendTensors(std::move(*triple), outputs);
  C10_THROW_ERROR(TypeError, std::string("the AnyModule returned ") + value.type_info().name() +
                                 ", expected a tensor, a vector or a tuple of up to three: give the module itself");
}

StageFunction functionOf(torch::nn::AnyModule module) {
  if (module.is_empty()) return nullptr;
  return detail::ofArguments([module = std::move(module)](const auto&... tensors) mutable {
    std::vector<at::Tensor> outputs;
    appendValue(module.any_forward(tensors...), outputs);
    return outputs;
  });
}

Status checkDevice(const std::string& name, const at::Tensor& tensor, at::Device device) {
  if (!tensor.defined() || tensor.device() == device) return Status::ok();
  return Status::invalidArgument(name + " of its module is on " + tensor.device().str() + ", expected " + device.str() +
                                 ", the schedule's device");
}

}  // namespace

namespace detail {

void refuseArguments(std::size_t given, const std::vector<std::size_t>& expected) {
  std::string counts;
  for (const std::size_t count : expected) counts += (counts.empty() ? "" : " or ") + std::to_string(count);
  C10_THROW_ERROR(ValueError, "the module was called with " + std::to_string(given) + " tensors, expected " + counts);
}

}  // namespace detail

ModuleStage::ModuleStage(std::int32_t index, torch::nn::AnyModule given)
    : index(index), module(given.is_empty() ? nullptr : given.ptr()) {
  function = functionOf(std::move(given));
}

Status ModuleStage::check(at::Device device) const {
  if (!function) return Status::invalidArgument("its module is null, expected one");
  if (module == nullptr) return Status::ok();
  for (const auto& parameter : module->named_parameters()) {
    FARANDOLE_RETURN_IF_ERROR(checkDevice(parameter.key(), parameter.value(), device));
  }
  for (const auto& buffer : module->named_buffers()) {
    FARANDOLE_RETURN_IF_ERROR(checkDevice(buffer.key(), buffer.value(), device));
  }
  return Status::ok();
}

}  // namespace farandole::pipeline
