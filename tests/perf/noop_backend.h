#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace farandole::perf {

// Moves nothing: a message through it costs what c10d itself costs. As torch's
// "fake", whose header needs Python.
class NoopBackend : public ::c10d::Backend {
 public:
  using ::c10d::Backend::Backend;
  using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

  const std::string getBackendName() const override { return "noop"; }
  WorkPtr send(std::vector<at::Tensor>& /*tensors*/, int /*peer*/, int /*tag*/) override { return done(); }
  WorkPtr recv(std::vector<at::Tensor>& /*tensors*/, int /*peer*/, int /*tag*/) override { return done(); }

 private:
  class DoneWork : public ::c10d::Work {
    bool isCompleted() override { return true; }
    bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  };

  // A new one each time, as every backend needs it.
  static WorkPtr done() { return c10::make_intrusive<DoneWork>(); }
};

}  // namespace farandole::perf
