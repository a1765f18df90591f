#include "ddp/backward_sink.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>

#include "ddp/compiled_backward.h"

namespace farandole::ddp {
namespace {

using torch::autograd::Node;

class PreHook : public torch::autograd::FunctionPreHook {
 public:
  explicit PreHook(std::function<void()> reached) : reached_(std::move(reached)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    reached_();
    return grads;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuseCompiledBackward(); }

 private:
  std::function<void()> reached_;
};

}  // namespace

void onBackwardOf(const std::vector<at::Tensor>& outputs, const std::function<void()>& reached) {
  std::vector<Node*> nodes;
  const auto hook = [&](const at::TensorBase& tensor) {
    const auto node = tensor.grad_fn();
    if (!node || std::find(nodes.begin(), nodes.end(), node.get()) != nodes.end()) return;
    nodes.push_back(node.get());
    node->add_pre_hook(std::make_unique<PreHook>(reached));
  };
  for (const at::Tensor& output : outputs) {
    if (!output.defined()) continue;
    hook(output);
    // A view that is changed in place gets another operation, over that of its base.
    if (output.is_view()) hook(output._base());
  }
}

}  // namespace farandole::ddp
