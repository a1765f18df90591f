#include "pipeline/runtime/split_backward.h"

#include <torch/csrc/autograd/engine.h>

#include <memory>

namespace farandole::pipeline {

namespace {

using torch::autograd::edge_list;
using torch::autograd::variable_list;

void execute(const edge_list& roots, const variable_list& grads, bool keepGraph, const edge_list& ends) {
  torch::autograd::Engine::get_default_engine().execute(roots, grads, keepGraph, /*create_graph=*/false,
                                                        /*accumulate_grad=*/true, ends);
}

using Hook = std::unique_ptr<torch::autograd::FunctionPreHook>;

// Sees what flows into a node, and lets it pass.
class Capture final : public torch::autograd::FunctionPreHook {
 public:
  variable_list operator()(const variable_list& grads) override { return *into = grads; }

  variable_list* into = nullptr;
};

// Captures what flows into the nodes, as long as it lives. The hooks are used again and again.
class Captures {
 public:
  Captures(const std::vector<Node*>& nodes, std::vector<variable_list>& into, std::vector<Hook>& hooks)
      : nodes_(nodes), hooks_(hooks) {
    if (into.size() < nodes.size()) into.resize(nodes.size());
    while (hooks.size() < nodes.size()) hooks.push_back(std::make_unique<Capture>());
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      into[i].clear();
      static_cast<Capture&>(*hooks[i]).into = &into[i];
      nodes[i]->add_pre_hook(std::move(hooks[i]));
    }
  }
  Captures(const Captures&) = delete;
  Captures& operator=(const Captures&) = delete;
  ~Captures() {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      hooks_[i] = std::move(nodes_[i]->pre_hooks().back());
      nodes_[i]->pre_hooks().pop_back();
    }
  }

 private:
  const std::vector<Node*>& nodes_;
  std::vector<Hook>& hooks_;
};

}  // namespace

void runBackward(const edge_list& roots, const variable_list& grads) {
  execute(roots, grads, /*keepGraph=*/false, /*ends=*/{});
}

void SplitBackward::analyze(const edge_list& roots, const edge_list& inputs, std::span<const std::uint64_t> hookedOps) {
  clear();
  for (const torch::autograd::Edge& input : inputs) {
    if (input.is_valid()) inputs_.push_back(input);
  }
  graph_.build(roots, inputs_, hookedOps);
}

void SplitBackward::runInput(edge_list& roots, variable_list& grads, DeferredBackward& deferred) {
  if (!graph_.reachesInputs()) {
    deferred.roots.swap(roots);
    deferred.grads.swap(grads);
    return clear();
  }
  for (std::size_t i = 0; i < roots.size(); ++i) {
    const bool isEarly = graph_.isEarly(roots[i].function.get());
    (isEarly ? roots_ : deferred.roots).push_back(roots[i]);
    (isEarly ? grads_ : deferred.grads).push_back(grads[i]);
  }
  for (Node* leaf : graph_.earlyLeaves()) inputs_.emplace_back(leaf->getptr(), 0);
  if (graph_.isAllEarly()) inputs_.clear();  // no ends are named: then it goes to all

  const std::vector<Node*>& nodes = graph_.splitNodes();
  {
    const Captures captures(nodes, captured_, hooks_);
    execute(roots_, grads_, /*keepGraph=*/!nodes.empty(), inputs_);
  }
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const auto node = nodes[i]->getptr();
    const std::size_t before = deferred.roots.size();
    for (std::uint32_t nr = 0; nr < captured_[i].size(); ++nr) {
      if (!captured_[i][nr].defined()) continue;
      deferred.roots.emplace_back(node, nr);
      deferred.grads.push_back(std::move(captured_[i][nr]));
    }
    if (deferred.roots.size() == before) {  // nothing flowed into it: hooks of weights still expect to be called
      deferred.roots.emplace_back(node, 0);
      deferred.grads.emplace_back();
    }
    captured_[i].clear();
  }
  // W must not go along the input path again; and what was only part of that goes now, with all that it saved.
  for (Node* node : nodes) {
    for (torch::autograd::Edge& edge : node->next_edges()) {
      if (edge.is_valid() && graph_.isEarly(edge.function.get())) edge = torch::autograd::Edge();
    }
  }
  roots.clear();
  grads.clear();
  clear();
}

void SplitBackward::clear() {
  for (variable_list& grads : captured_) grads.clear();
  roots_.clear();
  grads_.clear();
  inputs_.clear();
}

void SplitBackward::runWeight(DeferredBackward& deferred) {
  if (!deferred.roots.empty()) runBackward(deferred.roots, deferred.grads);
  deferred.roots.clear();
  deferred.grads.clear();
}

}  // namespace farandole::pipeline
