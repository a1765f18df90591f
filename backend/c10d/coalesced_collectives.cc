// Several tensors in one call; torch calls them for what it has collected in a batch, after that.
#include <utility>

#include "backend/c10d/listed_outputs.h"
#include "backend/c10d/memory_apart.h"
#include "backend/c10d/premultiplication.h"
#include "backend/c10d/process_group.h"
#include "backend/c10d/tensor_checks.h"

namespace farandole::backend {

using ::c10d::OpType;

WorkPtr ProcessGroupFarandole::allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) {
  const LeavingByError leaving(*openBatch_);
  TORCH_CHECK_VALUE(!tensors.empty(), "all_reduce_coalesced: tensors is empty; expected one or more");
  std::vector<Reducing> reducings;
  reducings.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    checkDense("all_reduce_coalesced", "tensors", tensor);
    reducings.push_back(reducingFor("all_reduce_coalesced", opts.reduceOp, tensor));
  }
  const std::vector<std::size_t> listed = firstMentions(tensors);
  const ListedOutputs reduced = ListedOutputs::inPlace("all_reduce_coalesced", tensors, listed);
  const Tensors& places = reduced.places();
  for (const std::size_t i : listed) premultiply(opts.reduceOp, places[i]);
  return runCollective(OpType::ALLREDUCE_COALESCED, "farandole:all_reduce_coalesced", opts, tensors, places,
                       [&](CollectiveCalls& calls) {
                         for (const std::size_t i : listed) calls.allReduce(reducings[i], sliceOf(places[i]));
                         reduced.deliver(calls);
                       });
}

WorkPtr ProcessGroupFarandole::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                   const ::c10d::AllgatherOptions& opts) {
  // c10d's layout: outputs[i][j] is what rank i gave as its input j.
  const auto size = static_cast<std::size_t>(size_);
  TORCH_CHECK_VALUE(outputs.size() == size, "all_gather_coalesced: output_tensor_lists has ", outputs.size(),
                    " lists; expected ", size_, ", one for each rank");
  Tensors given = inOrder(inputs);
  Tensors all;
  for (const Tensors& list : outputs) {
    checkFlats("all_gather_coalesced", "output_tensor_lists", list, "input_tensor_list", given, 1);
    all.insert(all.end(), list.begin(), list.end());
  }
  std::vector<Apart> parts;
  parts.reserve(given.size());
  for (std::size_t j = 0; j < given.size(); ++j) {
    std::vector<Slice> slices(size);
    for (std::size_t i = 0; i < size; ++i) slices[i] = sliceOf(outputs[i][j]);
    parts.push_back({std::move(slices), {sliceOf(given[j])}});
  }
  readAllApart(given, parts, rank_);
  return runCollective(OpType::ALLGATHER_COALESCED, "farandole:all_gather_coalesced", opts, all, given,
                       [&](CollectiveCalls& calls) {
                         for (const Apart& part : parts) calls.allGather(part.parts[0], part.outputs, Layout::kList);
                       });
}

WorkPtr ProcessGroupFarandole::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                               const ::c10d::AllgatherOptions& opts) {
  const LeavingByError leaving(*openBatch_);
  Tensors given = inOrder(inputs);
  checkFlats("all_gather_into_tensor_coalesced", "outputs", outputs, "inputs", given, size_);
  std::vector<Apart> parts;
  parts.reserve(given.size());
  for (std::size_t i = 0; i < given.size(); ++i) {
    parts.push_back({equalSlices(outputs[i], size_), {sliceOf(given[i])}});
  }
  readAllApart(given, parts, rank_);
  return runCollective(OpType::_ALLGATHER_BASE, "farandole:all_gather_into_tensor_coalesced", opts, outputs, given,
                       [&](CollectiveCalls& calls) {
                         for (const Apart& part : parts) calls.allGather(part.parts[0], part.outputs, Layout::kFlat);
                       });
}

WorkPtr ProcessGroupFarandole::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                               const ::c10d::ReduceScatterOptions& opts) {
  const LeavingByError leaving(*openBatch_);
  const Tensors given = inOrder(inputs);
  checkFlats("reduce_scatter_tensor_coalesced", "inputs", given, "outputs", outputs, size_);
  std::vector<Reducing> reducings;
  reducings.reserve(outputs.size());
  for (const at::Tensor& output : outputs) {
    reducings.push_back(reducingFor("reduce_scatter_tensor_coalesced", opts.reduceOp, output));
  }
  Tensors data = premultiplied(opts.reduceOp, given);
  std::vector<Apart> parts;
  parts.reserve(data.size());
  for (std::size_t i = 0; i < data.size(); ++i) parts.push_back({{sliceOf(outputs[i])}, equalSlices(data[i], size_)});
  readAllApart(data, parts, rank_);
  return runCollective(OpType::_REDUCE_SCATTER_BASE, "farandole:reduce_scatter_tensor_coalesced", opts, outputs, data,
                       [&](CollectiveCalls& calls) {
                         for (std::size_t i = 0; i < parts.size(); ++i) {
                           calls.reduceScatter(reducings[i], parts[i].outputs[0], parts[i].parts, Layout::kFlat);
                         }
                       });
}

}  // namespace farandole::backend
