#include "bindings/csrc/step_checks.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string>
#include <tuple>

namespace py = pybind11;

namespace farandole::python {

namespace {

// None where there is no tensor, 0 for those of inference, which count nothing.
py::object writeCountOf(py::handle tensor) {
  if (tensor.is_none()) return py::none();
  if (!THPVariable_Check(tensor.ptr())) {
    throw py::type_error("expected a tensor or None, got a " + std::string(Py_TYPE(tensor.ptr())->tp_name));
  }
  const auto& counter = THPVariable_Unpack(tensor.ptr()).unsafeGetTensorImpl()->version_counter();
  return py::int_(counter.enabled() ? counter.current_version() : 0);
}

py::tuple writeCounts(const py::list& tensors) {
  py::tuple counts(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) counts[i] = writeCountOf(tensors[i]);
  return counts;
}

// Each module, and behind it its children.
template <typename Visit>
bool visitFamilies(const py::list& modules, Visit visit) {
  static PyObject* const name = PyUnicode_InternFromString("_modules");
  for (const py::handle module : modules) {
    if (!visit(module)) return false;
    const auto children = py::reinterpret_steal<py::object>(PyObject_GetAttr(module.ptr(), name));
    if (!children) throw py::error_already_set();
    if (py::isinstance<py::dict>(children)) {
      for (const auto& [_, child] : py::reinterpret_borrow<py::dict>(children)) {
        if (!visit(child)) return false;
      }
      continue;
    }
    for (const py::handle child : children.attr("values")()) {  // of a scripted module
      if (!visit(child)) return false;
    }
  }
  return true;
}

py::list families(const py::list& modules) {
  py::list all;
  visitFamilies(modules, [&all](py::handle member) {
    all.append(member);
    return true;
  });
  return all;
}

bool areFamilies(const py::list& modules, const py::list& expected) {
  std::size_t place = 0;
  const bool areSame = visitFamilies(modules, [&](py::handle member) {
    return place < expected.size() && member.ptr() == PyList_GET_ITEM(expected.ptr(), place++);
  });
  return areSame && place == expected.size();
}

bool areItems(const py::dict& items, const py::list& keys, const py::list& values) {
  if (items.size() != keys.size()) return false;
  std::size_t place = 0;
  for (const auto& [key, value] : items) {
    const auto i = static_cast<Py_ssize_t>(place++);
    if (key.ptr() != PyList_GET_ITEM(keys.ptr(), i) || value.ptr() != PyList_GET_ITEM(values.ptr(), i)) return false;
  }
  return true;
}

bool areElements(py::handle container, const py::list& elements) {
  std::size_t place = 0;
  for (const py::handle element : py::reinterpret_borrow<py::iterable>(container)) {
    if (place == elements.size()) return false;
    if (element.ptr() != PyList_GET_ITEM(elements.ptr(), static_cast<Py_ssize_t>(place++))) return false;
  }
  return place == elements.size();
}

// Of containers: what they have held, with the keys where they are dicts.
bool areContents(const py::list& contents) {
  return std::all_of(contents.begin(), contents.end(), [](py::handle each) {
    const auto [container, keys, held] = py::cast<std::tuple<py::object, py::object, py::list>>(each);
    if (keys.is_none()) return areElements(container, held);
    return areItems(py::cast<py::dict>(container), py::cast<py::list>(keys), held);
  });
}

}  // namespace

void bindStepChecks(py::module_& module) {
  module.def("write_counts", &writeCounts, py::arg("tensors"));
  module.def("families", &families, py::arg("modules"));
  module.def("are_items", &areItems, py::arg("items"), py::arg("keys"), py::arg("values"));
  module.def("are_contents", &areContents, py::arg("contents"));
  module.def("are_families", &areFamilies, py::arg("modules"), py::arg("expected"));
}

}  // namespace farandole::python
