#include "backend/c10d/listed_outputs.h"

#include <ATen/MemoryOverlap.h>

#include "backend/c10d/tensor_checks.h"

namespace farandole::backend {
namespace {

// What cannot be copied to, or has no order to arrive in, is refused by the checks.
bool arrivesElsewhere(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu() &&
         !(tensor.is_non_overlapping_and_dense() && hasOrderOf(tensor, like)) &&
         (like.is_contiguous() || tensor.sizes() == like.sizes()) &&
         at::has_internal_overlap(tensor) != at::MemOverlap::Yes;
}

}  // namespace

ListedOutputs::ListedOutputs(const std::vector<at::Tensor>& list, const at::Tensor& like) : places_(list) {
  for (at::Tensor& place : places_) {
    if (!arrivesElsewhere(place, like)) continue;
    at::Tensor arrival = like.is_contiguous() ? at::empty(place.sizes(), place.options())
                                              : at::empty_strided(like.sizes(), like.strides(), place.options());
    copies_.emplace_back(std::exchange(place, arrival), arrival);
  }
}

void ListedOutputs::deliver(CollectiveCalls& calls) const {
  if (copies_.empty()) return;
  calls.then([copies = copies_] {
    const at::AutoDispatchBelowADInplaceOrView noAutograd;
    for (const auto& [to, from] : copies) to.copy_(from);
  });
}

}  // namespace farandole::backend
