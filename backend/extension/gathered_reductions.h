#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace farandole {

// What a backend implements, beside c10d::Backend, that can reduce tensors from where they are, so that nobody copies
// them together beforehand. Calls go with c10d's own on other ranks. Inputs are dense, and of the output's type; they
// must be left alone until the work is done.
class GatheredReductions {
 public:
  virtual ~GatheredReductions() = default;

  // Whether it can on this kind of device.
  virtual bool gathers(c10::DeviceType device) const = 0;

  // Whether a reduce-scatter of what is shorter than float32 is rounded once, when all ranks' values are added up.
  virtual bool roundsOnce() const = 0;

  // An all-reduce of what `inputs` hold, one after another, into `output`, which has as many elements in all. An input
  // may be the very part of `output` where its result goes.
  virtual c10::intrusive_ptr<c10d::Work> allReduceFrom(const std::vector<at::Tensor>& inputs, at::Tensor& output,
                                                       const c10d::AllreduceOptions& options) = 0;

  // Whether it can do without an output, too.
  virtual bool reducesInPlaces(c10::DeviceType device) const = 0;

  // The same, where this is so: each part of the result goes where its input is, which are one type on one device.
  virtual c10::intrusive_ptr<c10d::Work> allReduceInPlaces(const std::vector<at::Tensor>& tensors,
                                                           const c10d::AllreduceOptions& options) = 0;

  // A reduce-scatter of them into `part`. An input may be where it would lie in `whole`, which has as many elements and
  // of which nothing is left as it was; `part` may be this rank's part of that.
  virtual c10::intrusive_ptr<c10d::Work> reduceScatterFrom(const std::vector<at::Tensor>& inputs, at::Tensor& whole,
                                                           at::Tensor& part,
                                                           const c10d::ReduceScatterOptions& options) = 0;
};

}  // namespace farandole
