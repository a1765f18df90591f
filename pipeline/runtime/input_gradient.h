#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/edge.h>

namespace farandole::pipeline {

// Makes `input`, which nothing has computed so far, require a gradient, that arrives at `edge`: an empty one, or that
// of an earlier input, which is used again if nobody knows of it any more.
//
// To autograd it is then what it is in the whole model: the result of something before, which a module may change in
// place. A leaf that requires a gradient it may not (an nn.ReLU(inplace=True) in front of a stage).
void requireInputGradient(const at::Tensor& input, torch::autograd::Edge& edge);

// Takes what has arrived at an edge of requireInputGradient(): undefined where nothing flowed.
at::Tensor takeInputGradient(const torch::autograd::Edge& edge);

}  // namespace farandole::pipeline
