#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ddp/model_agreement.h"

namespace farandole::ddp {

// Models of flat parameters, p0, p1 and so on, and losses whose gradients are known.

at::Tensor parameter(int64_t numel, double value = 1.0);  // of doubles
Model modelOf(const std::vector<at::Tensor>& tensors);

// A loss whose gradient for each parameter used is `scale` everywhere. The first
// of `order` gets its gradient last.
at::Tensor lossOf(const std::vector<at::Tensor>& tensors, const std::vector<std::size_t>& order, double scale);
std::vector<std::size_t> allOf(const std::vector<at::Tensor>& tensors);

void backward(const at::Tensor& loss);

bool isEverywhere(const at::Tensor& tensor, double value);

// What `body` throws; empty when it does not.
std::string errorOf(const std::function<void()>& body);

std::size_t countOf(const std::vector<std::string>& events, const std::string& event);

}  // namespace farandole::ddp
