#include "pipeline/runtime/backward_graph.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace farandole::pipeline {

namespace {

// What torch.compile makes refuses to run in a graph that is kept, reentrant checkpoints in a backward that computes a
// part.
bool needsWholeBackward(const Node& node) {
  const std::string name = node.name();
  return name == "CompiledFunctionBackward" || name == "CheckpointFunctionBackward";
}

}  // namespace

bool hasHooks(Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() ||
         !node.post_hooks().empty();
}

void BackwardGraph::build(const torch::autograd::edge_list& roots, const torch::autograd::edge_list& inputs,
                          std::span<const std::uint64_t> hookedOps) {
  entries_.clear();
  numbers_.clear();
  splitNodes_.clear();
  earlyLeaves_.clear();
  unsplittables_.clear();
  unsplittable_ = nullptr;
  isAllEarly_ = false;
  for (const torch::autograd::Edge& input : inputs) entries_[enter(input.function.get())].isOnInputPath = true;
  for (const torch::autograd::Edge& root : roots) visit(root.function.get());
  reachesInputs_ = std::any_of(roots.begin(), roots.end(), [this](const torch::autograd::Edge& root) {
    return entries_[numbers_.at(root.function.get())].isOnInputPath;
  });
  if (reachesInputs_) classify(hookedOps);
}

void BackwardGraph::classify(std::span<const std::uint64_t> hookedOps) {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (!entry.isOnInputPath) continue;
    Node& node = *entry.node;
    const bool isUsers = isUserFunction(node);
    if (isUsers && needsWholeBackward(node)) {
      isAllEarly_ = true;
      unsplittable_ = &node;
      splitNodes_.clear();
      return;
    }
    if (!hasWeightEdge(node)) continue;
    if (isUsers || hasHooks(node) || std::binary_search(hookedOps.begin(), hookedOps.end(), node.sequence_nr())) {
      unsplittables_.push_back(static_cast<std::int32_t>(i));
    } else {
      splitNodes_.push_back(&node);
    }
  }
  if (unsplittables_.empty()) return;
  findComponents();
  findEarlyLeaves();
}

// A function whose backward is the user's code, in Python or C++. Its class is a template, or lives in a library that
// this one does not link: it is told by its name.
bool BackwardGraph::isUserFunction(const Node& node) {
  const auto [known, isNew] = userFunctionTypes_.emplace(&typeid(node), false);
  if (isNew) {
    const char* name = known->first->name();
    known->second = std::strstr(name, "autograd6PyNode") != nullptr || std::strstr(name, "autograd7CppNode") != nullptr;
  }
  return known->second;
}

// Depth first, so that a node ends after all that it feeds.
void BackwardGraph::visit(Node* root) {
  if (numbers_.count(root) != 0) return;
  stack_.push_back({enter(root), 0});
  while (!stack_.empty()) {
    Visit& top = stack_.back();
    Entry& entry = entries_[top.entry];
    const torch::autograd::edge_list& edges = entry.node->next_edges();
    if (top.nextEdge == edges.size()) {
      stack_.pop_back();
      continue;
    }
    Node* next = edges[top.nextEdge].function.get();
    const auto known = next == nullptr ? numbers_.end() : numbers_.find(next);
    if (next == nullptr) {
      ++top.nextEdge;
    } else if (known == numbers_.end()) {
      stack_.push_back({enter(next), 0});  // comes back to this edge when it has ended
    } else {
      entry.isOnInputPath = entry.isOnInputPath || entries_[known->second].isOnInputPath;
      ++top.nextEdge;
    }
  }
}

std::int32_t BackwardGraph::enter(Node* node) {
  const auto number = static_cast<std::int32_t>(entries_.size());
  const auto [place, isNew] = numbers_.emplace(node, number);
  if (isNew) entries_.push_back({node, number});
  return place->second;
}

bool BackwardGraph::hasWeightEdge(const Node& node) const {
  return std::any_of(node.next_edges().begin(), node.next_edges().end(), [this](const torch::autograd::Edge& edge) {
    return edge.is_valid() && !entries_[numbers_.at(edge.function.get())].isOnInputPath;
  });
}

void BackwardGraph::findComponents() {
  unsplittable_ = entries_[unsplittables_.front()].node;
  const auto forEachWeightEdge = [this](const Entry& entry, const auto& action) {
    for (const torch::autograd::Edge& edge : entry.node->next_edges()) {
      if (!edge.is_valid()) continue;
      const std::int32_t next = numbers_.at(edge.function.get());
      if (!entries_[next].isOnInputPath) action(componentOf(next));
    }
  };
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].isOnInputPath) continue;
    forEachWeightEdge(entries_[i], [&](std::int32_t component) {
      entries_[component].component = componentOf(static_cast<std::int32_t>(i));
    });
  }
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].component = componentOf(static_cast<std::int32_t>(i));
  }
  for (const std::int32_t number : unsplittables_) {
    forEachWeightEdge(entries_[number], [&](std::int32_t component) { entries_[component].isComponentEarly = true; });
  }
  std::erase_if(splitNodes_, [this](const Node* node) {
    return std::all_of(node->next_edges().begin(), node->next_edges().end(), [this](const torch::autograd::Edge& edge) {
      return !edge.is_valid() || isEarly(edge.function.get());
    });
  });
}

void BackwardGraph::findEarlyLeaves() {
  for (const Entry& entry : entries_) {
    if (!entry.isOnInputPath && entry.node->next_edges().empty() && isEarly(entry.node)) {
      earlyLeaves_.push_back(entry.node);
    }
  }
}

bool BackwardGraph::isEarly(const Node* node) const {
  const std::int32_t number = numbers_.at(node);
  return isAllEarly_ || entries_[number].isOnInputPath || entries_[entries_[number].component].isComponentEarly;
}

// Union-find, with paths halved on the way.
std::int32_t BackwardGraph::componentOf(std::int32_t entry) {
  while (entries_[entry].component != entry) {
    entries_[entry].component = entries_[entries_[entry].component].component;
    entry = entries_[entry].component;
  }
  return entry;
}

}  // namespace farandole::pipeline
