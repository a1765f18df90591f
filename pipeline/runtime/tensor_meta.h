#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

namespace farandole::pipeline {

// What a stage must know of a tensor before it arrives.
struct TensorMeta {
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  bool requiresGrad = false;  // its gradient will be sent back
  bool isPacket = false;      // see PacketNotes

  static TensorMeta of(const at::Tensor& tensor);
  // Where it is on a stage of this device: packets are read by the host.
  at::Device deviceOn(at::Device stage) const { return isPacket ? at::Device(at::kCPU) : stage; }
  at::Tensor zeros(at::Device stage) const {
    return at::zeros(sizes, at::TensorOptions(dtype).device(deviceOn(stage)));
  }

  // Same sizes and dtype; whether a gradient flows is not part of the layout.
  bool sameLayout(const TensorMeta& other) const { return dtype == other.dtype && sizes == other.sizes; }
  bool matches(const at::Tensor& tensor) const {
    return dtype == tensor.scalar_type() && tensor.sizes() == at::IntArrayRef(sizes) &&
           requiresGrad == tensor.requires_grad();
  }
  bool operator==(const TensorMeta&) const = default;
};

// "float32[4, 16]"; with " requires grad" when it does.
std::string toString(const TensorMeta& meta);

// "(float32[4, 16], int64[4])"
std::string toString(const std::vector<TensorMeta>& metas);

}  // namespace farandole::pipeline
