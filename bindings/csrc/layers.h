#pragma once

#include <torch/csrc/utils/pybind.h>

namespace farandole::python {

// One per layer, each in the file of its name: translate, release the GIL, nothing else.
void bindBackend(pybind11::module_& module);
void bindPipeline(pybind11::module_& module);
void bindDdp(pybind11::module_& module);
void bindSparse(pybind11::module_& module);

}  // namespace farandole::python
