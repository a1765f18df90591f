#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pipeline/runtime/backward_graph.h"

namespace farandole::pipeline {

// What the I of a microbatch has left for its W: edges of the graph, and the gradients that flow into them.
struct DeferredBackward {
  torch::autograd::edge_list roots;
  torch::autograd::variable_list grads;
};

// The whole backward: adds gradients to the .grad of all leaves, and frees the graph.
void runBackward(const torch::autograd::edge_list& roots, const torch::autograd::variable_list& grads);

// Runs the backward of a stage in two halves, as zero-bubble schedules need it (Qi et al. 2023): the gradients of the
// inputs, which the stage before waits for, and later those of the weights.
//
// analyze(), then runInput() with the same roots, or neither. After I only the nodes that run again in W are left of
// the graph, with what they saved. One thread; throws what the engine throws.
class SplitBackward {
 public:
  // `inputs`: where their gradients arrive; those that need none may be there without a function.
  void analyze(const torch::autograd::edge_list& roots, const torch::autograd::edge_list& inputs,
               std::span<const std::uint64_t> hookedOps);

  // The node that runs in I alone, with the gradients of the weights that it feeds; null when there is none.
  const Node* unsplittable() const { return graph_.unsplittable(); }

  // Gives the inputs their gradients, and adds those of weights to their .grad where a node cannot be split.
  void runInput(torch::autograd::edge_list& roots, torch::autograd::variable_list& grads, DeferredBackward& deferred);

  // Adds the gradients of the weights to their .grad.
  static void runWeight(DeferredBackward& deferred);

  // Lets go what a backward that failed, or was only analyzed, has left.
  void clear();

 private:
  BackwardGraph graph_;
  std::vector<torch::autograd::variable_list> captured_;                  // by split node: what I gave it
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> hooks_;  // which notes that; by split node, too
  torch::autograd::edge_list inputs_, roots_;                             // scratch
  torch::autograd::variable_list grads_;
};

}  // namespace farandole::pipeline
