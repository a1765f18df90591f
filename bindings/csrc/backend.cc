#include "bindings/csrc/layers.h"

namespace farandole::python {

void bindBackend(pybind11::module_& module) {}

}  // namespace farandole::python
