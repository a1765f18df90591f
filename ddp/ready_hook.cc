#include "ddp/ready_hook.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

#include "ddp/compiled_backward.h"

namespace farandole::ddp {
namespace {

class PostHook : public torch::autograd::FunctionPostHook {
 public:
  explicit PostHook(ReadyHook::OnReady onReady) : onReady_(std::move(onReady)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    onReady_(inputs.empty() ? at::Tensor() : inputs[0]);
    return outputs;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuseCompiledBackward(); }

 private:
  ReadyHook::OnReady onReady_;
};

}  // namespace

ReadyHook::ReadyHook(const at::Tensor& param, OnReady onReady)
    : accumulator_(torch::autograd::impl::grad_accumulator(param)),
      key_(accumulator_->add_post_hook(std::make_unique<PostHook>(std::move(onReady)))) {}

ReadyHook::~ReadyHook() {
  if (accumulator_) accumulator_->del_post_hook(key_);
}

bool ReadyHook::isOn(const at::Tensor& param) const {
  return torch::autograd::impl::try_get_grad_accumulator(param) == accumulator_;
}

bool ReadyHook::isAskedFor() const {
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  if (asked == nullptr || asked->empty()) return true;
  const auto found = asked->find(accumulator_.get());
  return found != asked->end() && found->second.needed_;
}

}  // namespace farandole::ddp
