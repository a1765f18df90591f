#pragma once

#include <torch/csrc/utils/pybind.h>

namespace farandole::python {

// What the sparse pipelines look at in each step, over many objects.
void bindStepChecks(pybind11::module_& module);

}  // namespace farandole::python
