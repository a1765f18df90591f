#include "ddp/graph_reads.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>
#include <utility>

namespace farandole::ddp {
namespace {

using torch::autograd::Node;

constexpr std::uint64_t kLeaf = std::numeric_limits<std::uint64_t>::max();  // that of what accumulates a gradient
constexpr std::uint64_t kMostOperations = std::uint64_t{1} << 26;           // of one forward

// Of what an earlier operation has made, what that has viewed, and so on.
Node* viewedBy(Node* node, std::uint64_t began) {
  while (node->sequence_nr() < began && node->num_outputs() == 1 && node->next_edge(0).is_valid()) {
    node = node->next_edge(0).function.get();
  }
  return node;
}

}  // namespace

GraphReads::GraphReads(const std::vector<at::Tensor>& parameters, const std::vector<int>& groups) {
  TORCH_CHECK_VALUE(parameters.size() == groups.size(), "farandole.ddp: ", groups.size(), " groups of ",
                    parameters.size(), " parameters; expected as many");
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    parameters_[parameters[p].unsafeGetTensorImpl()] = {static_cast<int>(p), groups[p]};
  }
}

int GraphReads::tooEarly(const std::vector<at::Tensor>& outputs, std::uint64_t began,
                         const std::vector<std::int64_t>& since) const {
  int first = -1;
  std::uint64_t at = kLeaf;
  const auto note = [&](const at::Tensor& read, std::uint64_t operation) {
    const auto found = parameters_.find(read.unsafeGetTensorImpl());
    if (found == parameters_.end() || operation >= at) return;
    const std::int64_t from = since.at(found->second.group);
    if (from >= 0 && static_cast<std::uint64_t>(from) <= operation) return;
    first = found->second.index;
    at = operation;
  };
  std::vector<char> seen;  // by operation since then: a hash table would take most of the time
  std::vector<Node*> left;
  const auto add = [&](Node* node) {
    const std::uint64_t number = node->sequence_nr() - began;
    if (node->sequence_nr() < began || number >= kMostOperations) return;
    if (number >= seen.size()) seen.resize(2 * number + 1);
    if (std::exchange(seen[number], 1) == 0) left.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (const auto node = output.grad_fn()) add(node.get());
  }
  while (!left.empty()) {
    Node* const node = left.back();
    left.pop_back();
    for (const auto& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      Node* const next = viewedBy(edge.function.get(), began);
      if (next->sequence_nr() != kLeaf) {
        add(next);
      } else if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(next)) {
        note(leaf->variable, node->sequence_nr());
      }
    }
  }
  return first;
}

}  // namespace farandole::ddp
