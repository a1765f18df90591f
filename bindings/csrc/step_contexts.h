#pragma once

#include <torch/csrc/utils/pybind.h>

namespace farandole::python {

// What a step of a pipeline enters, some ten times. Types of CPython's own interface: a call of pybind11's costs three
// times as much.
void bindStepContexts(pybind11::module_& module);

}  // namespace farandole::python
