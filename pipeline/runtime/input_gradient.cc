#include "pipeline/runtime/input_gradient.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <string>
#include <utility>

#include "pipeline/runtime/backward_graph.h"

namespace farandole::pipeline {

namespace {

using torch::autograd::Edge;
using torch::autograd::variable_list;

// The end of a backward. Where autograd's own for leaves adds to a tensor's .grad, this one keeps what comes.
class InputGradient final : public Node {
 public:
  InputGradient() : Node(/*sequence_nr=*/UINT64_MAX) {}  // runs as soon as it can, as that for leaves does

  variable_list apply(variable_list&& grads) override {
    if (grads[0].defined()) kept = kept.defined() ? kept + grads[0] : std::move(grads[0]);
    return {};
  }
  std::string name() const override { return "StageInput"; }

  at::Tensor kept;
};

// Whether an earlier input's node is as a new one: its graph is gone, nobody holds it or has hooks on it.
bool isFree(const Edge& edge) {
  if (!edge.is_valid() || edge.function.use_count() > 1) return false;
  return !hasHooks(*edge.function);
}

// Newer torch counts nodes itself, older by std::shared_ptr.
template <typename Pointer>
Pointer own(Node* node) {
  if constexpr (requires { Pointer::unsafe_steal_from_new(node); }) {
    return Pointer::unsafe_steal_from_new(node);
  } else {
    return Pointer(node);
  }
}

}  // namespace

void requireInputGradient(const at::Tensor& input, Edge& edge) {
  if (isFree(edge)) {
    edge.function->clear_input_metadata();
    takeInputGradient(edge).reset();
  } else {
    edge = Edge(own<decltype(edge.function)>(new InputGradient()), 0);
  }
  edge.function->add_input_metadata(input);
  torch::autograd::impl::set_gradient_edge(input, edge);
}

at::Tensor takeInputGradient(const Edge& edge) { return std::move(static_cast<InputGradient&>(*edge.function).kept); }

}  // namespace farandole::pipeline
