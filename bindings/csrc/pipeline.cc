#include "bindings/csrc/layers.h"

namespace farandole::python {

void bindPipeline(pybind11::module_& module) {}

}  // namespace farandole::python
