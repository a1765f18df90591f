#pragma once

#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "backend/c10d/collective_calls.h"

namespace farandole::backend {

// A list of tensors that a collective fills, one for each rank. On the CPU they may have gaps, or their dimensions in
// another order than what is sent: that arrives elsewhere, and is copied to where it belongs when all of it has come.
class ListedOutputs {
 public:
  // `like`: what this rank gives. Anything that is wrong with the list is left to the checks.
  ListedOutputs(const std::vector<at::Tensor>& list, const at::Tensor& like);

  // Where it arrives.
  const std::vector<at::Tensor>& places() const { return places_; }
  // After what fills the places.
  void deliver(CollectiveCalls& calls) const;

 private:
  std::vector<at::Tensor> places_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // to, from
};

}  // namespace farandole::backend
