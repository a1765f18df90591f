#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend/collective/algorithms.h"

namespace farandole::backend {

using collective::Slice;

// What NCCL calls a reduction: its numbers for dtype and operation.
struct NcclReduction {
  int dtype;
  std::size_t elementBytes;      // of what is counted: a complex number counts as two
  int op;                        // unless there is a factor
  std::optional<double> factor;  // PREMUL_SUM: what this rank's data is multiplied by
};

// How elements are combined.
struct Reducing {
  const ::c10d::ReduceOp& op;
  at::ScalarType dtype;
  std::optional<NcclReduction> nccl;  // of tensors on CUDA: looked up once, by CudaGroup::reducing()
};

// Whether the slices of all ranks are one tensor, cut in equal parts: of the call, and so the same on all ranks, as
// where single tensors lie in memory is not.
enum class Layout { kFlat, kList };

// What a collective of c10d's, whose arguments have been checked, consists of; carried out as one by what serves the
// device of its tensors: a program on the CPU, a group of NCCL's calls on CUDA. Slices are memory of that device.
class CollectiveCalls {
 public:
  virtual ~CollectiveCalls() = default;
  virtual void broadcast(int root, Slice data) = 0;
  virtual void allReduce(const Reducing& reducing, Slice data) = 0;
  // The other ranks' data may be lost.
  virtual void reduce(const Reducing& reducing, int root, Slice data) = 0;
  // Slices are one for each rank; only the root's outputs and inputs are looked at.
  virtual void allGather(Slice input, std::span<const Slice> outputs, Layout layout) = 0;
  virtual void gather(int root, Slice input, std::span<const Slice> outputs) = 0;
  virtual void scatter(int root, Slice output, std::span<const Slice> inputs) = 0;
  virtual void reduceScatter(const Reducing& reducing, Slice output, std::span<const Slice> inputs, Layout layout) = 0;
  virtual void allToAll(std::span<const Slice> outputs, std::span<const Slice> inputs) = 0;
  // On the CPU: this rank's own work, once all of the above is done. It throws nothing.
  virtual void then(std::function<void()> work) = 0;
};

}  // namespace farandole::backend
