#include "backend/c10d/process_group.h"
#include "backend/c10d/reduce_kernels.h"
#include "backend/c10d/tensor_checks.h"
#include "backend/collective/algorithm_table.h"
#include "backend/collective/host_layout.h"

namespace farandole::backend {

using ::c10d::OpType;
using collective::Gathered;
using collective::Program;

namespace {

// How many elements the inputs have, all of the type and on the CPU.
std::int64_t checkInputs(const char* operation, const Tensors& inputs, at::ScalarType type,
                         const ::c10d::ReduceOp& op) {
  std::int64_t numel = 0;
  for (const at::Tensor& input : inputs) {
    checkDense(operation, "inputs", input);
    TORCH_CHECK_VALUE(input.scalar_type() == type && input.is_cpu(), operation, ": inputs has a ", input.scalar_type(),
                      " on ", input.device(), "; expected ", type, " on the CPU, as the others and the output");
    numel += input.numel();
  }
  TORCH_CHECK_VALUE(!premulFactor(op), operation, ": PREMUL_SUM of inputs; expected another reduction");
  return numel;
}

// That `inputs` make up `whole`, on the CPU.
void checkInputs(const char* operation, const Tensors& inputs, const at::Tensor& whole, const ::c10d::ReduceOp& op) {
  checkTensor(operation, "output", whole);
  const std::int64_t numel = checkInputs(operation, inputs, whole.scalar_type(), op);
  TORCH_CHECK_VALUE(whole.is_cpu() && numel == whole.numel(), operation, ": inputs have ", numel,
                    " elements; expected ", whole.numel(), " as the output, on the CPU");
}

}  // namespace

// In shared memory, and where every rank has a host of its own and the table's own rule stands: direct.
bool ProcessGroupFarandole::roundsOnce() const {
  const collective::Topology& here = topology();
  if (here.wholeSegment() != nullptr) return true;
  return (here.layout == nullptr || here.layout->mostRanks() == 1) && here.table->overrides().empty();
}

WorkPtr ProcessGroupFarandole::allReduceFrom(const Tensors& inputs, at::Tensor& output,
                                             const ::c10d::AllreduceOptions& opts) {
  checkInputs("all_reduce", inputs, output, opts.reduceOp);
  const collective::Reduction reduction = reductionFor(opts.reduceOp, output.scalar_type());
  return runProgram(OpType::ALLREDUCE, "farandole:all_reduce", opts, {output}, inputs, [&](Program& program) {
    collective::allReduce(program, topology(), reduction, Gathered(slicesOf(inputs)), sliceOf(output));
  });
}

bool ProcessGroupFarandole::reducesInPlaces(c10::DeviceType device) const {
  return gathers(device) && topology().wholeSegment() != nullptr;
}

WorkPtr ProcessGroupFarandole::allReduceInPlaces(const Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(!tensors.empty(), "all_reduce: inputs is empty; expected one or more");
  TORCH_CHECK_VALUE(topology().wholeSegment() != nullptr,
                    "all_reduce in several places: ranks of the group do not share memory; expected an output");
  const at::ScalarType type = tensors[0].scalar_type();
  checkInputs("all_reduce", tensors, type, opts.reduceOp);
  const collective::Reduction reduction = reductionFor(opts.reduceOp, type);
  return runProgram(OpType::ALLREDUCE, "farandole:all_reduce", opts, tensors, {}, [&](Program& program) {
    collective::allReduceInPlaces(program, topology(), reduction, Gathered(slicesOf(tensors)));
  });
}

WorkPtr ProcessGroupFarandole::reduceScatterFrom(const Tensors& inputs, at::Tensor& whole, at::Tensor& part,
                                                 const ::c10d::ReduceScatterOptions& opts) {
  checkInputs("reduce_scatter_tensor", inputs, whole, opts.reduceOp);
  checkFlat("reduce_scatter_tensor", "whole", whole, part, size_);
  const collective::Reduction reduction = reductionFor(opts.reduceOp, whole.scalar_type());
  Tensors kept = inputs;
  kept.push_back(whole);
  return runProgram(OpType::_REDUCE_SCATTER_BASE, "farandole:_reduce_scatter_base", opts, {part}, std::move(kept),
                    [&](Program& program) {
                      collective::reduceScatter(program, topology(), reduction, Gathered(slicesOf(inputs)),
                                                sliceOf(whole), sliceOf(part));
                    });
}

}  // namespace farandole::backend
