#pragma once

#include <torch/csrc/utils/pybind.h>

namespace farandole::python {

// PipelineStage and PipelineExecutor: pipeline/runtime for Python.
void bindPipelineExecutor(pybind11::module_& module);

}  // namespace farandole::python
