#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace farandole::pipeline {

// What the last stage's outputs are worth: (output, target) -> scalar, or (outputs, target) where there are several, of
// one microbatch. Made from any function of those, or a loss of torch::nn; none by default.
class Loss {
 public:
  Loss() = default;

  template <typename Function>
  requires(!std::is_same_v<std::remove_cvref_t<Function>, Loss>) Loss(Function function) {
    using List = const std::vector<at::Tensor>&;
    using One = const at::Tensor&;
    if constexpr (std::is_constructible_v<bool, Function&> && !std::is_empty_v<Function>) {
      if (!static_cast<bool>(function)) return;
    }
    if constexpr (std::is_invocable_r_v<at::Tensor, Function&, One, One>) {
      function_ = [function = std::move(function)](List outputs, One target) mutable -> at::Tensor {
        return function(only(outputs), target);
      };
    } else {
      static_assert(std::is_invocable_r_v<at::Tensor, Function&, List, One>,
                    "a loss is called with (output, target), tensors both, or with (std::vector of outputs, target)");
      function_ = std::move(function);
    }
  }

  explicit operator bool() const { return static_cast<bool>(function_); }

  // May throw.
  at::Tensor operator()(const std::vector<at::Tensor>& outputs, const at::Tensor& target) const {
    return function_(outputs, target);
  }

 private:
  static const at::Tensor& only(const std::vector<at::Tensor>& outputs) {
    TORCH_CHECK_VALUE(outputs.size() == 1, "the last stage returned ", outputs.size(),
                      " tensors, expected 1, which is what the loss takes");
    return outputs[0];
  }

  std::function<at::Tensor(const std::vector<at::Tensor>&, const at::Tensor&)> function_;
};

}  // namespace farandole::pipeline
