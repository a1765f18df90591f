#pragma once

#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "backend/c10d/collective_calls.h"

namespace farandole::backend {

// Of tensors that are reduced in place: one that is listed again is the same one, and is reduced once, as where all are
// copied into one buffer first. A lazy clone is another one, and gets memory of its own here.
std::vector<std::size_t> firstMentions(const std::vector<at::Tensor>& tensors);

// A list of tensors that a collective fills, one for each rank. On the CPU they may have gaps, overlap each other, or
// have their dimensions in another order than what is sent: that arrives elsewhere, and is copied to where it belongs
// when all of it has come, one after the other, as by gloo.
class ListedOutputs {
 public:
  // `like`: what this rank gives. Anything that is wrong with the list is left to the checks.
  ListedOutputs(const std::vector<at::Tensor>& list, const at::Tensor& like);
  // Of one tensor that has been checked, for what comes in order from lists.
  static ListedOutputs inOrder(const at::Tensor& output);
  // Of tensors that have been checked and are reduced in place: where those of these indices overlap, their values.
  static ListedOutputs inPlace(const char* operation, const std::vector<at::Tensor>& list,
                               const std::vector<std::size_t>& indices);

  // Where it arrives.
  const std::vector<at::Tensor>& places() const { return places_; }
  // After what fills the places.
  void deliver(CollectiveCalls& calls) const;

 private:
  explicit ListedOutputs(const std::vector<at::Tensor>& list) : places_(list) {}
  void moveTo(at::Tensor& place, const at::Tensor& arrival);

  std::vector<at::Tensor> places_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // to, from
};

}  // namespace farandole::backend
