#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

#include "backend/c10d/collective_calls.h"

namespace farandole::backend {

// The sum of all ranks' sparse tensors (COO), in this rank's own, on its device: first all ranks tell each other their
// shapes and how many values they have, then indices and values are gathered, and every rank adds them up in the order
// of the ranks. Who uses it carries out what the two rounds call, and goes from one to the next.
class SparseSum {
 public:
  // `tensor` is coalesced or not. On CUDA the host waits for that. `nameOf` names a rank in errors.
  SparseSum(at::Tensor tensor, int rank, int size, std::function<std::string(int)> nameOf);

  // The first round, on the CPU.
  void gatherShapes(CollectiveCalls& calls) const;
  // What it works on.
  std::vector<at::Tensor> shapeTensors() const { return {shape_, shapesOfAll_}; }
  // After it. Throws when another rank's tensor does not fit this one's.
  void prepareValues();
  // The second round, on the device.
  void gatherValues(CollectiveCalls& calls) const;
  std::vector<at::Tensor> valueTensors() const;
  // After it; on CUDA on the current stream.
  void addUp() const;

  const at::Tensor& tensor() const { return tensor_; }

 private:
  // The number of values that this rank has.
  std::int64_t checkShape(int rank) const;

  const at::Tensor tensor_;
  const at::Tensor mine_;  // coalesced
  const int rank_;
  const int size_;
  const std::function<std::string(int)> nameOf_;
  const at::Tensor shape_;
  const at::Tensor shapesOfAll_;  // a row for each rank
  at::Tensor indices_;
  at::Tensor values_;
  std::vector<at::Tensor> indicesOfAll_;
  std::vector<at::Tensor> valuesOfAll_;
};

}  // namespace farandole::backend
