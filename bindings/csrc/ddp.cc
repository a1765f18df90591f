#include "bindings/csrc/layers.h"

namespace farandole::python {

void bindDdp(pybind11::module_& module) {}

}  // namespace farandole::python
