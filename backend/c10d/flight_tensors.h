#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "backend/observe/flight_recorder.h"

namespace farandole::backend {

// What a flight record tells of one tensor that is sent, or received.
inline void recordMessage(observe::FlightRecord& record, const at::Tensor& tensor, bool isSend) {
  const auto dtype = static_cast<std::uint8_t>(tensor.scalar_type());
  if (isSend) {
    record.addInput(dtype, tensor.sizes());
  } else {
    record.addOutput(dtype, tensor.sizes());
  }
}

// What it tells of a collective's, as torch's analyzer wants them: one tensor for each rank in a list are
// one tensor with a dimension more, or flat where their sizes differ; what is done in place is both input and output.
// `results` and `others`: as CollectiveOperation::setTensors() has them.
void recordTensors(observe::FlightRecord& record, ::c10d::OpType type, const std::vector<at::Tensor>& results,
                   const std::vector<at::Tensor>& others);

}  // namespace farandole::backend
