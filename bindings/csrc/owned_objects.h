#pragma once

#include <torch/csrc/utils/pybind.h>

namespace farandole::python {

// For a class whose C++ object holds Python objects that may hold it in turn: the collector of cycles sees them, where
// T::visit tells them. Nothing else may hold that C++ object: what is visited counts as held by its Python object
// alone.
//
// There is no tp_clear: what is in such a cycle beside it, an instance or a function, lets go.
template <typename T>
pybind11::custom_type_setup visitsOwnedObjects() {
  return pybind11::custom_type_setup([](PyHeapTypeObject* heapType) {
    PyTypeObject& type = heapType->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      if (!pybind11::detail::is_holder_constructed(self)) return 0;
      return pybind11::cast<const T&>(pybind11::handle(self)).visit(visit, arg);
    };
  });
}

}  // namespace farandole::python
