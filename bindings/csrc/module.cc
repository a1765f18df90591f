#include "bindings/csrc/layers.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ half of farandole.";
  farandole::python::bindBackend(module);
  farandole::python::bindPipeline(module);
  farandole::python::bindDdp(module);
  farandole::python::bindSparse(module);
}
