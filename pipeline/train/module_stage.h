#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/train/stage_function.h"

namespace farandole::pipeline {

namespace detail {

template <typename Type>
concept IsHolder = std::is_base_of_v<torch::detail::ModuleHolderIndicator, Type>;  // torch::nn::Linear and such

template <typename>
inline constexpr bool kIsModulePointer = false;
template <typename Module>
inline constexpr bool kIsModulePointer<std::shared_ptr<Module>> = std::derived_from<Module, torch::nn::Module>;

template <typename Type>
concept IsFunction = !IsHolder<Type> && !kIsModulePointer<Type> && !std::same_as<Type, torch::nn::AnyModule>;

// Whether the module's only forward() takes one list of tensors.
template <typename Module>
constexpr bool forwardTakesList() {
  if constexpr (requires { &Module::forward; }) {
    return kIsTensorList<typename OnlyArgument<decltype(&Module::forward)>::type>;
  } else {
    return false;
  }
}

// A module's forward() as a function.
template <typename Module>
struct Forward {
  template <typename... Tensors>
  auto operator()(const Tensors&... tensors) const -> decltype(std::declval<Module&>().forward(tensors...)) {
    return module->forward(tensors...);
  }

  std::shared_ptr<Module> module;
};

template <typename Module>
StageFunction forwardOf(const std::shared_ptr<Module>& module) {
  if (module == nullptr) return nullptr;
  if constexpr (forwardTakesList<Module>()) {
    return ofList([module](const std::vector<at::Tensor>& tensors) { return module->forward(tensors); });
  } else {
    return ofArguments(Forward<Module>{module});
  }
}

}  // namespace detail

// One stage of a model that is cut into a pipeline: a module, and its place. It is called with the inputs of a step or
// with the tensors of the stages before it, the lowest stage's first, and returns a tensor or several (a tuple, a
// vector). Its parameters are on the schedule's device; train() and eval(), and its optimizer, are its owner's affair.
struct ModuleStage {
  // A module of torch::nn, or derived from torch::nn::Module with a forward() of tensors.
  template <std::derived_from<torch::nn::Module> Module>
  ModuleStage(std::int32_t index, const std::shared_ptr<Module>& module)
      : index(index), function(detail::forwardOf(module)), module(module) {}

  template <detail::IsHolder Holder>
  ModuleStage(std::int32_t index, const Holder& holder)
      : ModuleStage(index, holder.is_empty() ? nullptr : holder.ptr()) {}

  ModuleStage(std::int32_t index, torch::nn::AnyModule module);

  // Any function of tensors; `parameters` is the module whose parameters it uses, where there is one.
  template <detail::IsFunction Function>
  ModuleStage(std::int32_t index, Function function, std::shared_ptr<torch::nn::Module> parameters = nullptr)
      : index(index), function(stageFunctionOf(std::move(function))), module(std::move(parameters)) {}

  // That there is something to call, and that all of it is on the device.
  Status check(at::Device device) const;

  std::int32_t index;  // of the pipeline's stages, from 0
  StageFunction function;
  std::shared_ptr<torch::nn::Module> module;  // may be null

  // Which outputs go to a stage, by their places; all of them to one that is not named.
  std::map<std::int32_t, std::vector<std::int32_t>> outputsTo = {};
};

}  // namespace farandole::pipeline
