#include "backend/c10d/listed_outputs.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <set>
#include <utility>

#include "backend/c10d/memory_apart.h"
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

bool overlapEachOther(const std::vector<at::Tensor>& tensors) {
  const auto hasMemory = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu();
  };
  return std::all_of(tensors.begin(), tensors.end(), hasMemory) && anyOverlap(slicesOf(tensors));
}

}  // namespace

std::vector<std::size_t> firstMentions(const std::vector<at::Tensor>& tensors) {
  std::set<std::pair<const void*, std::size_t>> seen;
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const bool isEmpty = tensors[i].numel() == 0;
    const bool isNew = isEmpty || seen.emplace(tensors[i].mutable_data_ptr(), tensors[i].nbytes()).second;
    if (isNew) indices.push_back(i);
  }
  return indices;
}

ListedOutputs::ListedOutputs(const std::vector<at::Tensor>& list, const at::Tensor& like) : ListedOutputs(list) {
  for (at::Tensor& place : places_) {
    if (!arrivesElsewhere(place, like)) continue;
    moveTo(place, like.is_contiguous() ? at::empty(place.sizes(), place.options())
                                       : at::empty_strided(like.sizes(), like.strides(), place.options()));
  }
  if (!overlapEachOther(list)) return;
  copies_.clear();
  for (std::size_t i = 0; i < list.size(); ++i) {
    at::Tensor& place = places_[i];
    if (place.is_same(list[i])) place = at::empty_strided(place.sizes(), place.strides(), place.options());
    copies_.emplace_back(list[i], place);
  }
}

ListedOutputs ListedOutputs::inOrder(const at::Tensor& output) {
  ListedOutputs outputs({output});
  if (output.is_cpu() && !output.is_contiguous()) {
    outputs.moveTo(outputs.places_[0], at::empty(output.sizes(), output.options()));
  }
  return outputs;
}

ListedOutputs ListedOutputs::inPlace(const char* operation, const std::vector<at::Tensor>& list,
                                     const std::vector<std::size_t>& indices) {
  ListedOutputs outputs(list);
  std::vector<collective::Slice> slices;
  slices.reserve(indices.size());
  for (const std::size_t i : indices) slices.push_back(sliceOf(list[i]));
  if (!anyOverlap(slices)) return outputs;
  TORCH_CHECK_VALUE(list[0].is_cpu(), operation,
                    ": tensors share memory in part; expected each to have its own, or to be listed again as it is");
  const at::AutoDispatchBelowADInplaceOrView noAutograd;
  for (const std::size_t i : indices) outputs.moveTo(outputs.places_[i], list[i].clone());
  return outputs;
}

void ListedOutputs::moveTo(at::Tensor& place, const at::Tensor& arrival) {
  copies_.emplace_back(std::exchange(place, arrival), arrival);
}

void ListedOutputs::deliver(CollectiveCalls& calls) const {
  if (copies_.empty()) return;
  calls.then([copies = copies_] {
    const at::AutoDispatchBelowADInplaceOrView noAutograd;
    for (const auto& [to, from] : copies) to.copy_(from);
  });
}

}  // namespace farandole::backend
