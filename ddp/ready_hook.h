#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <functional>

namespace farandole::ddp {

// Calls a function each time autograd has accumulated a gradient of one
// parameter, on the thread that ran that part of the backward, without the GIL.
// It sits on the gradient accumulator, which it keeps alive (the parameter only
// holds it weakly); the parameter's own hooks stay the user's. The registration
// ends with this object, which must not happen while a backward runs.
class ReadyHook {
 public:
  // `brought`: what autograd came with, which it is done with; undefined when it came without a gradient.
  using OnReady = std::function<void(const at::Tensor& brought)>;

  ReadyHook(const at::Tensor& param, OnReady onReady);
  ~ReadyHook();
  ReadyHook(ReadyHook&& other) noexcept = default;
  ReadyHook& operator=(ReadyHook&&) = delete;

  // Whether gradients still come here: autograd gives a parameter that changes its type or device another accumulator.
  bool isOn(const at::Tensor& param) const;
  // Within a backward: whether it is for all parameters that it finds, or for this one among others; autograd.grad() is
  // not, and neither is one whose `inputs` are others.
  bool isAskedFor() const;

 private:
  // A shared_ptr in torch 2.11, an intrusive_ptr in 2.15.
  using NodePtr = decltype(torch::autograd::Edge::function);

  NodePtr accumulator_;
  uintptr_t key_ = 0;
};

}  // namespace farandole::ddp
