#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace farandole::perf {

// Moves nothing: what goes through it costs what c10d itself costs. torch's "fake" moves data within the rank in most
// collectives, and its header needs Python.
class NoopBackend : public ::c10d::Backend {
 public:
  using ::c10d::Backend::Backend;
  using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

  const std::string getBackendName() const override { return "noop"; }
  WorkPtr send(std::vector<at::Tensor>& /*tensors*/, int /*peer*/, int /*tag*/) override { return done(); }
  WorkPtr recv(std::vector<at::Tensor>& /*tensors*/, int /*peer*/, int /*tag*/) override { return done(); }
  WorkPtr allreduce(std::vector<at::Tensor>& /*tensors*/, const ::c10d::AllreduceOptions& /*options*/) override {
    return done();
  }
  WorkPtr _allgather_base(at::Tensor& /*output*/, at::Tensor& /*input*/,
                          const ::c10d::AllgatherOptions& /*options*/) override {
    return done();
  }
  WorkPtr _reduce_scatter_base(at::Tensor& /*output*/, at::Tensor& /*input*/,
                               const ::c10d::ReduceScatterOptions& /*options*/) override {
    return done();
  }
  WorkPtr alltoall_base(at::Tensor& /*output*/, at::Tensor& /*input*/, std::vector<std::int64_t>& /*outputSplits*/,
                        std::vector<std::int64_t>& /*inputSplits*/,
                        const ::c10d::AllToAllOptions& /*options*/) override {
    return done();
  }

 private:
  class DoneWork : public ::c10d::Work {
    bool isCompleted() override { return true; }
    bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  };

  // A new one each time, as every backend needs it.
  static WorkPtr done() { return c10::make_intrusive<DoneWork>(); }
};

}  // namespace farandole::perf
