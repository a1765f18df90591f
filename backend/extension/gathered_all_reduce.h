#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace farandole {

// What a backend implements, beside c10d::Backend, that can sum up tensors from where they are into another one, so
// that nobody copies them together beforehand.
class GatheredAllReduce {
 public:
  virtual ~GatheredAllReduce() = default;

  // Whether it can on this kind of device.
  virtual bool gathers(c10::DeviceType device) const = 0;

  // An all-reduce of what `inputs` hold, one after another, into `output`, which has as many elements in all and is
  // contiguous, as they are, and of their type. An input may be the very part of `output` where its result goes. It
  // goes with c10d's all-reduce on other ranks. The inputs must be left alone until it is done.
  virtual c10::intrusive_ptr<c10d::Work> allReduceFrom(const std::vector<at::Tensor>& inputs, at::Tensor& output,
                                                       const c10d::AllreduceOptions& options) = 0;
};

}  // namespace farandole
