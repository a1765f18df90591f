#pragma once

#include <utility>

#include "backend/c10d/collective_calls.h"
#include "backend/c10d/reduce_kernels.h"

namespace farandole::backend {

// Collectives as steps of a program, on the CPU.
class ProgramCalls final : public CollectiveCalls {
 public:
  ProgramCalls(collective::Program& program, const collective::Topology& topology)
      : program_(program), topology_(topology) {}

  void broadcast(int root, Slice data) override { collective::broadcast(program_, topology_, root, data); }
  void allReduce(const Reducing& reducing, Slice data) override {
    collective::allReduce(program_, topology_, reductionOf(reducing), data);
  }
  void reduce(const Reducing& reducing, int root, Slice data) override {
    collective::reduce(program_, topology_, reductionOf(reducing), root, data);
  }
  void allGather(Slice input, std::span<const Slice> outputs, Layout) override {
    collective::allGather(program_, topology_, input, outputs);
  }
  void gather(int root, Slice input, std::span<const Slice> outputs) override {
    collective::gather(program_, topology_, root, input, outputs);
  }
  void scatter(int root, Slice output, std::span<const Slice> inputs) override {
    collective::scatter(program_, topology_, root, output, inputs);
  }
  void reduceScatter(const Reducing& reducing, Slice output, std::span<const Slice> inputs, Layout) override {
    collective::reduceScatter(program_, topology_, reductionOf(reducing), output, inputs);
  }
  void allToAll(std::span<const Slice> outputs, std::span<const Slice> inputs) override {
    collective::allToAll(program_, topology_, outputs, inputs);
  }
  void then(std::function<void()> work) override {
    program_.wait();
    program_.call(std::move(work));
  }

 private:
  static collective::Reduction reductionOf(const Reducing& reducing) {
    return reductionFor(reducing.op, reducing.dtype);
  }

  collective::Program& program_;
  const collective::Topology& topology_;
};

}  // namespace farandole::backend
