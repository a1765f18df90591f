#pragma once

#include <ATen/ATen.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <ranges>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace farandole::pipeline {

// What a stage computes, in the one form in which it is kept: appends its results to `outputs`.
using StageFunction = std::function<void(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs)>;

namespace detail {

inline constexpr std::size_t kMaxArguments = 8;

template <typename>
inline constexpr bool kNever = false;

template <std::size_t>
using TensorArgument = const at::Tensor&;

// Throws: the function takes another number of tensors.
[[noreturn]] void refuseArguments(std::size_t given, const std::vector<std::size_t>& expected);

// Appends a tensor, or those of a tuple or range, nested as they may be.
template <typename Returned>
void appendTensors(Returned&& result, std::vector<at::Tensor>& outputs) {
  using Type = std::remove_cvref_t<Returned>;
  if constexpr (std::is_convertible_v<Returned, at::Tensor>) {
    outputs.push_back(std::forward<Returned>(result));
  } else if constexpr (requires { std::tuple_size<Type>::value; }) {
    std::apply([&](auto&&... parts) { (appendTensors(std::forward<decltype(parts)>(parts), outputs), ...); },
               std::forward<Returned>(result));
  } else if constexpr (std::ranges::range<Type>) {
    for (auto&& part : result) appendTensors(std::forward<decltype(part)>(part), outputs);
  } else {
    static_assert(kNever<Type>, "a stage returns a tensor, or a tuple or range of tensors");
  }
}

// The type of the only argument, where there is one signature with one; else void.
template <typename>
struct OnlyArgument : std::type_identity<void> {};
template <typename R, typename A>
struct OnlyArgument<R (*)(A)> : std::type_identity<A> {};
template <typename R, typename C, typename A>
struct OnlyArgument<R (C::*)(A)> : std::type_identity<A> {};
template <typename R, typename C, typename A>
struct OnlyArgument<R (C::*)(A) const> : std::type_identity<A> {};

template <typename Argument>
inline constexpr bool kIsTensorList = std::is_constructible_v<Argument, const std::vector<at::Tensor>&> &&
                                      !std::same_as<std::remove_cvref_t<Argument>, at::Tensor>;
template <>
inline constexpr bool kIsTensorList<void> = false;

template <typename Function, std::size_t... Places>
constexpr bool takesTensors(std::index_sequence<Places...>) {
  return std::is_invocable_v<Function&, TensorArgument<Places>...>;
}

// Calls `function` with its first `Count` tensors as arguments; false where it does not take so many.
template <std::size_t Count, typename Function>
bool callWith(Function& function, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) {
  if constexpr (takesTensors<Function>(std::make_index_sequence<Count>())) {
    [&]<std::size_t... Places>(std::index_sequence<Places...>) { appendTensors(function(inputs[Places]...), outputs); }
    (std::make_index_sequence<Count>());
    return true;
  } else {
    return false;
  }
}

// A function of 1 to 8 tensors. Defaults and variadic functions let it have several counts.
template <typename Function>
StageFunction ofArguments(Function function) {
  return []<std::size_t... Less>(Function given, std::index_sequence<Less...>)->StageFunction {
    static_assert((takesTensors<Function>(std::make_index_sequence<Less + 1>()) || ...),
                  "a stage is called with one or more tensors: write a lambda that calls forward()");
    return [given = std::move(given)](const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) mutable {
      if (((inputs.size() == Less + 1 && callWith<Less + 1>(given, inputs, outputs)) || ...)) return;
      std::vector<std::size_t> expected;
      ((takesTensors<Function>(std::make_index_sequence<Less + 1>()) ? expected.push_back(Less + 1) : void()), ...);
      refuseArguments(inputs.size(), expected);
    };
  }
  (std::move(function), std::make_index_sequence<kMaxArguments>());
}

template <typename Function>
StageFunction ofList(Function function) {
  return [function = std::move(function)](const std::vector<at::Tensor>& inputs,
                                          std::vector<at::Tensor>& outputs) mutable {
    appendTensors(function(inputs), outputs);
  };
}

template <typename Function>
constexpr bool functionTakesList() {
  if constexpr (requires { &Function::operator(); }) {
    return kIsTensorList<typename OnlyArgument<decltype(&Function::operator())>::type>;
  } else {
    return kIsTensorList<typename OnlyArgument<Function>::type>;
  }
}

}  // namespace detail

// Of anything that is called with tensors, each an argument, or all as one list (vector, TensorList, span).
template <typename Function>
StageFunction stageFunctionOf(Function function) {
  if constexpr (detail::functionTakesList<Function>()) {
    return detail::ofList(std::move(function));
  } else {
    return detail::ofArguments(std::move(function));
  }
}

}  // namespace farandole::pipeline
