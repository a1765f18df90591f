#pragma once

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <span>
#include <typeinfo>
#include <vector>

namespace farandole::pipeline {

using torch::autograd::Node;

// Whether anybody's code runs as the node does.
bool hasHooks(Node& node);

// The backward graph of one microbatch of a stage, seen as what splits it into I and W.
//
// A node is on the input path when a gradient of the stage's inputs depends on it. All others, the weights' side, fall
// into components: sets of nodes that are connected without the input path. I computes the input path, W the weights'
// side. A node on the path that has edges to the weights' side runs in both: in I for its edges along the path, in W,
// from the gradient that it got in I, for the others.
//
// That needs a node that may run twice, for parts of its result. One that may not (a Python or C++ function of the
// user's, with hooks, or one that would unpack saved tensors by a hook again) runs in I alone, and all components that
// it feeds are computed there, too, whole, so that nothing is computed twice. What torch.compile makes, and a reentrant
// checkpoint, run in a whole backward only: where one is on the input path, I computes everything.
//
// Scratch: used again for every microbatch. One thread. Keeps no node alive.
class BackwardGraph {
 public:
  // `inputs`: where the gradients of the stage's inputs arrive. `hookedOps`: ascending sequence numbers of nodes whose
  // saved tensors have hooks.
  void build(const torch::autograd::edge_list& roots, const torch::autograd::edge_list& inputs,
             std::span<const std::uint64_t> hookedOps);

  // Whether any gradient of an input depends on the roots.
  bool reachesInputs() const { return reachesInputs_; }

  // The nodes of the input path that run in both halves.
  const std::vector<Node*>& splitNodes() const { return splitNodes_; }

  // Whether I computes everything.
  bool isAllEarly() const { return isAllEarly_; }

  // The ends of the weights' side that I computes where it does not compute everything, and the node for which it
  // computes more than the input path; null when there is none.
  const std::vector<Node*>& earlyLeaves() const { return earlyLeaves_; }
  const Node* unsplittable() const { return unsplittable_; }

  // Whether I computes what flows into this node, which build() has seen.
  bool isEarly(const Node* node) const;

 private:
  struct Entry {
    Node* node;
    std::int32_t component;  // of the weights' side: one entry stands for all of it
    bool isOnInputPath = false;
    bool isComponentEarly = false;  // of the one that stands for it
  };
  struct Visit {
    std::int32_t entry;
    std::uint32_t nextEdge;
  };

  void visit(Node* root);
  std::int32_t enter(Node* node);
  void classify(std::span<const std::uint64_t> hookedOps);
  void findComponents();
  void findEarlyLeaves();
  bool isUserFunction(const Node& node);
  std::int32_t componentOf(std::int32_t entry);
  bool hasWeightEdge(const Node& node) const;

  std::vector<Entry> entries_;
  ska::flat_hash_map<const Node*, std::int32_t> numbers_;
  std::vector<Visit> stack_;
  std::vector<std::int32_t> unsplittables_;                            // entries
  ska::flat_hash_map<const std::type_info*, bool> userFunctionTypes_;  // those seen
  std::vector<Node*> splitNodes_, earlyLeaves_;
  const Node* unsplittable_ = nullptr;
  bool reachesInputs_ = false;
  bool isAllEarly_ = false;
};

}  // namespace farandole::pipeline
