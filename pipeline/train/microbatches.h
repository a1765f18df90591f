#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "backend/common/status.h"
#include "pipeline/train/batch.h"

namespace farandole::pipeline {

// The inputs, one list for each microbatch, in `into`, which is kept from step to step; they are on the device. May
// throw what torch throws.
Status takeInputs(const Batch& batch, at::Device device, std::vector<std::vector<at::Tensor>>& into);

// The target likewise, one for each microbatch; undefined ones where there is none.
Status takeTargets(const Batch& batch, at::Device device, std::vector<at::Tensor>& into);

// [microbatch][output] to [output], each as one tensor.
Result<std::vector<at::Tensor>> mergeOutputs(const std::vector<std::vector<at::Tensor>>& microbatches);

}  // namespace farandole::pipeline
