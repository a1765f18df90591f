#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace farandole::pipeline {

// What a rank brings to one step, whole or as its microbatches. What its stages do not take is not looked at.
struct Batch {
  // The arguments of the first stage, each split along dimension 0 into parts whose sizes differ by at most one.
  std::vector<at::Tensor> inputs = {};
  // For the loss, on the rank with the last stage; split likewise.
  at::Tensor target = {};

  // Instead, one for each microbatch.
  std::vector<std::vector<at::Tensor>> inputMicrobatches = {};
  std::vector<at::Tensor> targetMicrobatches = {};

  bool wantsOutputs = false;  // those of the last stage are to be returned there; where they cannot, it alone is told
};

// What a step gives on the rank with the last stage; empty elsewhere. Without a graph.
struct StepResult {
  std::vector<at::Tensor> losses;   // of the microbatches that end on this rank, in their order
  std::vector<at::Tensor> outputs;  // where wanted: each output, its microbatches one after another along dimension 0
};

}  // namespace farandole::pipeline
