#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace farandole::backend {

// Counts a write to the results that gloo copies to their places, so that autograd refuses what it has saved of them.
// The other operations write unseen, as over gloo.
void markWritten(::c10d::OpType type, const std::vector<at::Tensor>& results);

}  // namespace farandole::backend
