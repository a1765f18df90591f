#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <vector>

#include "pipeline/runtime/stage.h"

namespace farandole::python {

// The Python objects of one step, set before it and dropped after it.
struct StepInputs {
  pybind11::object args;        // list[tuple], one per microbatch: of the first stage
  pybind11::object kwargs;      // list[dict] or None
  pybind11::object targets;     // list or None: then no loss is computed
  pybind11::object lossKwargs;  // dict or None
  pybind11::object outputs;     // list of None to fill, or None
  pybind11::object losses;      // list of None to fill, or None
};

// What Python code raised during a step: the executor sees texts, the caller of
// the step gets the exception itself. Used under the GIL, or inside catch.
class RaisedError {
 public:
  // Inside a catch block, with or without the GIL: "ValueError: text".
  std::string describe();

  // The first one since clear(), or null.
  const pybind11::object& first() const { return first_; }
  void clear() { first_ = pybind11::object(); }

 private:
  void keep(pybind11::object error);

  pybind11::object first_;
};

// A module and, on the last stage, its loss, as the executor's forward
// function. Takes the GIL for the call and no longer.
class PythonStage {
 public:
  // `callables`: those that the spec calls.
  PythonStage(pipeline::StageSpec spec, std::vector<std::shared_ptr<pybind11::object>> callables, bool isFirst,
              bool isLast, pybind11::object module, pybind11::object lossFn)
      : spec_(std::move(spec)),
        callables_(std::move(callables)),
        isFirst_(isFirst),
        isLast_(isLast),
        module_(std::move(module)),
        lossFn_(std::move(lossFn)) {}

  // The spec with this stage as its forward; `inputs` must outlive it.
  static pipeline::StageSpec bind(const std::shared_ptr<PythonStage>& stage, const StepInputs* inputs);

  // The Python objects that it holds, to the collector of cycles.
  int visit(visitproc visit, void* arg) const;

 private:
  void forward(const StepInputs& step, int microbatch, const std::vector<at::Tensor>& inputs,
               std::vector<at::Tensor>& outputs) const;
  void finish(const StepInputs& step, int microbatch, const pybind11::object& result,
              std::vector<at::Tensor>& outputs) const;

  void checkOutputs(const pybind11::object& result) const;

  pipeline::StageSpec spec_;
  std::vector<std::shared_ptr<pybind11::object>> callables_;
  bool isFirst_, isLast_;
  pybind11::object module_, lossFn_;
};

}  // namespace farandole::python
