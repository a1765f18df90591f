#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace farandole::backend {

// Tells autograd of the operations whose results gloo copies to their places, that it refuses what it has saved of
// these. Of the others it sees nothing, as over gloo.
void markWritten(::c10d::OpType type, const std::vector<at::Tensor>& results);

}  // namespace farandole::backend
