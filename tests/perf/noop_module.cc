// The module noop_backend: a backend that moves nothing, for benchmarks in Python.
#include <torch/csrc/utils/pybind.h>

#include "tests/perf/noop_backend.h"

PYBIND11_MODULE(noop_backend, module) {
  const pybind11::module_ c10d = pybind11::module_::import("torch._C._distributed_c10d");
  module.def(
      "create",
      [](int rank, int size) -> c10::intrusive_ptr<::c10d::Backend> {
        return c10::make_intrusive<farandole::perf::NoopBackend>(rank, size);
      },
      pybind11::arg("rank"), pybind11::arg("size"));
}
