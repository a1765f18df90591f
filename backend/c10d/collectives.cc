#include <algorithm>
#include <utility>

#include "backend/c10d/errors.h"
#include "backend/c10d/joint_work.h"
#include "backend/c10d/listed_outputs.h"
#include "backend/c10d/memory_apart.h"
#include "backend/c10d/premultiplication.h"
#include "backend/c10d/process_group.h"
#include "backend/c10d/program_calls.h"
#include "backend/c10d/tensor_checks.h"
#include "backend/c10d/written_results.h"

namespace farandole::backend {

using ::c10d::OpType;
using collective::Program;

namespace {

// What nobody may wait for wakes the loop up from here on. It costs who does wait at once 20 us of 200, or of 60 for
// 1 MiB; what is smaller is soon done where it is waited for.
constexpr std::size_t kUnattendedBytes = 4 << 20;

void checkRootTensor(const char* operation, std::int64_t rootTensor) {
  TORCH_CHECK_VALUE(rootTensor == 0, operation, ": rootTensor is ", rootTensor, "; expected 0, one tensor per rank");
}

// The list of one list of tensors that gather, scatter and their kin take.
Tensors& checkSingleList(const char* operation, const char* argument, std::vector<Tensors>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, operation, ": ", argument, " has ", lists.size(), " lists; expected one");
  return lists[0];
}

void checkSameSize(const char* operation, const char* argument, const Tensors& tensors, const at::Tensor& like) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.numel() == like.numel(), operation, ": ", argument, " has a tensor of ", tensor.numel(),
                      " elements; expected ", like.numel(), " as the other argument");
  }
}

std::size_t bytesOf(const Tensors& tensors) {
  std::size_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

}  // namespace

c10::intrusive_ptr<CollectiveWork> ProcessGroupFarandole::makeCollective(OpType type, const char* title,
                                                                         std::chrono::milliseconds timeout) {
  return c10::make_intrusive<CollectiveWork>(communicator_, workOptions(type, title, timeout));
}

template <typename Make>
WorkPtr ProcessGroupFarandole::toldByBatch(const Make& make) {
  if (openBatch_->find() == nullptr) return make();
  try {
    return make();
  } catch (...) {
    Batch* const batch = openBatch_->find();
    if (batch == nullptr) throw;
    batch->noteRefusal();
    return c10::make_intrusive<JointWork>(rank_, OpType::COALESCED, std::vector<WorkPtr>{});  // its caller may wait
  }
}

Reducing ProcessGroupFarandole::reducingFor(const char* operation, const ::c10d::ReduceOp& op,
                                            const at::Tensor& tensor) {
  if (tensor.is_cuda()) return CudaGroup::reducing(operation, op, tensor.scalar_type());
  (void)reductionFor(op, tensor.scalar_type());
  return {op, tensor.scalar_type(), std::nullopt};
}

WorkPtr ProcessGroupFarandole::runCollective(OpType type, const char* title, const Call& call, Tensors results,
                                             Tensors kept, const BuildCollective& build) {
  const at::Tensor& any = results.empty() ? kept[0] : results[0];
  for (const Tensors* tensors : {&results, &kept}) {
    for (const at::Tensor& tensor : *tensors) {
      TORCH_CHECK_VALUE(tensor.device() == any.device(), title, ": tensors are on ", any.device(), " and on ",
                        tensor.device(), "; expected one device");
    }
  }
  if (any.is_cpu()) markWritten(type, results);
  WorkPtr work;
  if (any.is_cuda()) {
    const at::Device device = any.device();
    work = cuda().run(workOptions(type, title, call.timeout), device, call.isAsync, std::move(results), std::move(kept),
                      build);
  } else {
    work = runProgram(type, title, call, std::move(results), std::move(kept), [&](Program& program) {
      ProgramCalls calls(program, topology());
      build(calls);
    });
  }
  if (Batch* const batch = openBatch_->find()) batch->collectives.push_back(work);
  return work;
}

WorkPtr ProcessGroupFarandole::runProgram(OpType type, const char* title, const Call& call, Tensors results,
                                          Tensors kept, const BuildProgram& build) {
  auto work = makeCollective(type, title, call.timeout);
  if (call.isAsync && std::max(bytesOf(results), bytesOf(kept)) >= kUnattendedBytes) work->goOnUnattended();
  work->setTensors(std::move(results), std::move(kept));
  Program program;
  build(program);
  work->setProgram(std::move(program), static_cast<std::uint32_t>(work->getSequencenumber()));
  work->launch();
  return work;
}

WorkPtr ProcessGroupFarandole::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) {
  return toldByBatch([&]() -> WorkPtr {
    const at::Tensor& tensor = checkSingleDense("broadcast", "tensor", tensors);
    checkRank("broadcast", "src", opts.rootRank, size_);
    checkRootTensor("broadcast", opts.rootTensor);
    return runCollective(OpType::BROADCAST, "farandole:broadcast", opts, tensors, {}, [&](CollectiveCalls& calls) {
      calls.broadcast(static_cast<int>(opts.rootRank), sliceOf(tensor));
    });
  });
}

WorkPtr ProcessGroupFarandole::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
  const at::Tensor& tensor = checkSingleDense("all_reduce", "tensor", tensors);
  const Reducing reducing = reducingFor("all_reduce", opts.reduceOp, tensor);
  premultiply(opts.reduceOp, tensor);
  return runCollective(OpType::ALLREDUCE, "farandole:all_reduce", opts, tensors, {},
                       [&](CollectiveCalls& calls) { calls.allReduce(reducing, sliceOf(tensor)); });
}

WorkPtr ProcessGroupFarandole::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  return toldByBatch([&]() -> WorkPtr {
    const at::Tensor& tensor = checkSingleDense("reduce", "tensor", tensors);
    checkRank("reduce", "dst", opts.rootRank, size_);
    checkRootTensor("reduce", opts.rootTensor);
    const Reducing reducing = reducingFor("reduce", opts.reduceOp, tensor);
    at::Tensor data = tensor;
    if (rank_ == opts.rootRank) {
      premultiply(opts.reduceOp, data);
    } else {
      data = premultiplied(opts.reduceOp, data);
    }
    return runCollective(OpType::REDUCE, "farandole:reduce", opts, tensors, {data}, [&](CollectiveCalls& calls) {
      calls.reduce(reducing, static_cast<int>(opts.rootRank), sliceOf(data));
    });
  });
}

WorkPtr ProcessGroupFarandole::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                         const ::c10d::AllgatherOptions& opts) {
  return toldByBatch([&]() -> WorkPtr {
    Tensors given = asListed(inputs);
    const at::Tensor& input = checkSingleDense("all_gather", "tensor", given);
    const Tensors& list = checkSingleList("all_gather", "tensor_list", outputs);
    const ListedOutputs arriving(list, input);
    checkList("all_gather", "tensor_list", arriving.places(), size_, input);
    checkFlat("all_gather", "tensor_list of this rank", list[rank_], input, 1);
    const auto slices = slicesOf(arriving.places());
    auto own = slicesOf(given);
    readApart(given, own, slices, rank_);
    return runCollective(OpType::ALLGATHER, "farandole:all_gather", opts, list, given, [&](CollectiveCalls& calls) {
      calls.allGather(own[0], slices, Layout::kList);
      arriving.deliver(calls);
    });
  });
}

WorkPtr ProcessGroupFarandole::_allgather_base(at::Tensor& output, at::Tensor& input,
                                               const ::c10d::AllgatherOptions& opts) {
  at::Tensor given = inOrder(input);
  checkTensor("all_gather_into_tensor", "input_tensor", given);
  checkTensor("all_gather_into_tensor", "output_tensor", output);
  checkFlat("all_gather_into_tensor", "output_tensor", output, given, size_);
  const auto slices = equalSlices(output, size_);
  std::vector<Slice> own{sliceOf(given)};
  readApart(given, own, slices, rank_);
  return runCollective(OpType::_ALLGATHER_BASE, "farandole:_all_gather_base", opts, {output}, {given},
                       [&](CollectiveCalls& calls) { calls.allGather(own[0], slices, Layout::kFlat); });
}

WorkPtr ProcessGroupFarandole::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                      const ::c10d::GatherOptions& opts) {
  return toldByBatch([&]() -> WorkPtr {
    Tensors given = asListed(inputs);
    const at::Tensor& input = checkSingleDense("gather", "tensor", given);
    checkRank("gather", "dst", opts.rootRank, size_);
    Tensors list;
    if (rank_ == opts.rootRank) {
      list = checkSingleList("gather", "gather_list", outputs);
    } else {
      TORCH_CHECK_VALUE(outputs.empty(), "gather: gather_list is given on rank ", rank_, "; expected on rank ",
                        opts.rootRank, " only");
    }
    const ListedOutputs arriving(list, input);
    if (rank_ == opts.rootRank) {
      checkList("gather", "gather_list", arriving.places(), size_, input);
      checkSameSize("gather", "gather_list", list, input);
    }
    const auto slices = slicesOf(arriving.places());
    auto own = slicesOf(given);
    readApart(given, own, slices, rank_);
    return runCollective(OpType::GATHER, "farandole:gather", opts, list, given, [&](CollectiveCalls& calls) {
      calls.gather(static_cast<int>(opts.rootRank), own[0], slices);
      arriving.deliver(calls);
    });
  });
}

WorkPtr ProcessGroupFarandole::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                  const ::c10d::GatherOptions& opts) {
  checkTensor("gather_into_tensor", "tensor", input);
  checkRank("gather_into_tensor", "dst", opts.rootRank, size_);
  const bool isRoot = rank_ == opts.rootRank;
  if (isRoot) {
    checkTensor("gather_into_tensor", "gather_tensor", output);
    checkFlat("gather_into_tensor", "gather_tensor", output, input, size_);
  }
  const auto slices = isRoot ? equalSlices(output, size_) : std::vector<Slice>{};
  at::Tensor given = input;
  std::vector<Slice> own{sliceOf(given)};
  readApart(given, own, slices, rank_);
  return runCollective(OpType::GATHER, "farandole:gather_into_tensor", opts, isRoot ? Tensors{output} : Tensors{},
                       {given},
                       [&](CollectiveCalls& calls) { calls.gather(static_cast<int>(opts.rootRank), own[0], slices); });
}

WorkPtr ProcessGroupFarandole::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                       const ::c10d::ScatterOptions& opts) {
  return toldByBatch([&]() -> WorkPtr {
    const ListedOutputs arriving = ListedOutputs::inOrder(checkSingleDense("scatter", "tensor", outputs));
    const at::Tensor& output = arriving.places()[0];
    checkRank("scatter", "src", opts.rootRank, size_);
    Tensors list;
    if (rank_ == opts.rootRank) {
      list = asListed(checkSingleList("scatter", "scatter_list", inputs));
      checkList("scatter", "scatter_list", list, size_, output);
      checkSameSize("scatter", "scatter_list", list, output);
    } else {
      TORCH_CHECK_VALUE(inputs.empty(), "scatter: scatter_list is given on rank ", rank_, "; expected on rank ",
                        opts.rootRank, " only");
    }
    auto slices = slicesOf(list);
    const Slice own = sliceOf(output);
    readApart(list, slices, {&own, 1}, rank_);
    return runCollective(OpType::SCATTER, "farandole:scatter", opts, outputs, list, [&](CollectiveCalls& calls) {
      calls.scatter(static_cast<int>(opts.rootRank), own, slices);
      arriving.deliver(calls);
    });
  });
}

WorkPtr ProcessGroupFarandole::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                              const ::c10d::ReduceScatterOptions& opts) {
  return toldByBatch([&]() -> WorkPtr {
    const ListedOutputs arriving = ListedOutputs::inOrder(checkSingleDense("reduce_scatter", "output", outputs));
    const at::Tensor& output = arriving.places()[0];
    const Tensors list = asListed(checkSingleList("reduce_scatter", "input_list", inputs));
    checkList("reduce_scatter", "input_list", list, size_, output);
    checkOwn("reduce_scatter", "input_list", list[rank_].numel(), "output", output.numel());
    const Reducing reducing = reducingFor("reduce_scatter", opts.reduceOp, output);
    Tensors data = premultiplied(opts.reduceOp, list);
    auto slices = slicesOf(data);
    const Slice own = sliceOf(output);
    readApart(data, slices, {&own, 1}, rank_);
    return runCollective(OpType::REDUCE_SCATTER, "farandole:reduce_scatter", opts, outputs, data,
                         [&](CollectiveCalls& calls) {
                           calls.reduceScatter(reducing, own, slices, Layout::kList);
                           arriving.deliver(calls);
                         });
  });
}

WorkPtr ProcessGroupFarandole::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                    const ::c10d::ReduceScatterOptions& opts) {
  const at::Tensor given = inOrder(input);
  checkTensor("reduce_scatter_tensor", "output", output);
  checkTensor("reduce_scatter_tensor", "input", given);
  checkFlat("reduce_scatter_tensor", "input", given, output, size_);
  const Reducing reducing = reducingFor("reduce_scatter_tensor", opts.reduceOp, output);
  at::Tensor data = premultiplied(opts.reduceOp, given);
  auto slices = equalSlices(data, size_);
  const Slice own = sliceOf(output);
  readApart(data, slices, {&own, 1}, rank_);
  return runCollective(OpType::_REDUCE_SCATTER_BASE, "farandole:_reduce_scatter_base", opts, {output}, {data},
                       [&](CollectiveCalls& calls) { calls.reduceScatter(reducing, own, slices, Layout::kFlat); });
}

WorkPtr ProcessGroupFarandole::alltoall_base(at::Tensor& output, at::Tensor& input,
                                             std::vector<std::int64_t>& outputSplits,
                                             std::vector<std::int64_t>& inputSplits,
                                             const ::c10d::AllToAllOptions& opts) {
  return toldByBatch([&]() -> WorkPtr {
    checkTensor("all_to_all_single", "output", output);
    checkTensor("all_to_all_single", "input", input);
    TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), "all_to_all_single: output has dtype ",
                     output.scalar_type(), "; expected ", input.scalar_type(), " as input");
    TORCH_CHECK_VALUE(output.device() == input.device(), "all_to_all_single: output is on device ", output.device(),
                      "; expected ", input.device(), " as input");
    const auto outputs = splitSlices("all_to_all_single", "output", output, outputSplits, size_);
    auto inputs = splitSlices("all_to_all_single", "input", input, inputSplits, size_);
    const auto numOf = [&](const Slice& part) { return static_cast<std::int64_t>(part.bytes / input.element_size()); };
    checkOwn("all_to_all_single", "input", numOf(inputs[rank_]), "output", numOf(outputs[rank_]));
    at::Tensor given = input;
    readApart(given, inputs, outputs, rank_);
    return runCollective(OpType::ALLTOALL_BASE, "farandole:all_to_all", opts, {output}, {given},
                         [&](CollectiveCalls& calls) { calls.allToAll(outputs, inputs); });
  });
}

WorkPtr ProcessGroupFarandole::alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) {
  return toldByBatch([&]() -> WorkPtr {
    TORCH_CHECK_VALUE(!inputs.empty(), "all_to_all: input_tensor_list is empty; expected one tensor for each rank");
    Tensors given = asListed(inputs);
    checkList("all_to_all", "input_tensor_list", given, size_, given[0]);
    const ListedOutputs arriving(outputs, given[0]);
    checkList("all_to_all", "output_tensor_list", arriving.places(), size_, given[0]);
    checkOwn("all_to_all", "input_tensor_list", given[rank_].numel(), "output_tensor_list", outputs[rank_].numel());
    const auto to = slicesOf(arriving.places());
    auto from = slicesOf(given);
    readApart(given, from, to, rank_);
    return runCollective(OpType::ALLTOALL, "farandole:all_to_all", opts, outputs, given, [&](CollectiveCalls& calls) {
      calls.allToAll(to, from);
      arriving.deliver(calls);
    });
  });
}

WorkPtr ProcessGroupFarandole::barrier(const ::c10d::BarrierOptions& opts) {
  const OpType type = OpType::BARRIER;
  const char* const title = "farandole:barrier";
  WorkPtr work;
  if (opts.device && opts.device->is_cuda()) {
    work = cuda().barrier(workOptions(type, title, opts.timeout), *opts.device);
  } else {
    work = runProgram(type, title, opts, {}, {}, [&](Program& program) { collective::barrier(program, topology()); });
  }
  if (Batch* const batch = openBatch_->find()) batch->collectives.push_back(work);
  return work;
}

}  // namespace farandole::backend
