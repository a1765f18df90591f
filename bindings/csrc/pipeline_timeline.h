#pragma once

#include <torch/csrc/utils/pybind.h>

namespace farandole::python {

// What pictures of a step are made from: measured steps, messages, memory over time.
void bindPipelineTimeline(pybind11::module_& module);

}  // namespace farandole::python
