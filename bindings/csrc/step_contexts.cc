#include "bindings/csrc/step_contexts.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace farandole::python {

namespace {

PyObject* none() { return Py_NewRef(Py_None); }

// Enters and leaves nothing, and is what any call of it gives: the place of a context, or of a function that makes one.
struct Nothing {
  PyObject base;
};

PyObject* callNothing(PyObject* self, PyObject* /*args*/, PyObject* /*kwargs*/) { return Py_NewRef(self); }
PyObject* enterNothing(PyObject* /*self*/, PyObject* /*unused*/) { return none(); }
PyObject* exitNothing(PyObject* /*self*/, PyObject* const* /*args*/, Py_ssize_t /*count*/) { return none(); }

// What torch.no_grad() does, which makes twelve calls.
struct NoGrad {
  PyObject base;
  bool wasEnabled;
};

PyObject* enterNoGrad(PyObject* self, PyObject* /*unused*/) {
  reinterpret_cast<NoGrad*>(self)->wasEnabled = c10::GradMode::is_enabled();
  c10::GradMode::set_enabled(false);
  return none();
}

PyObject* exitNoGrad(PyObject* self, PyObject* const* /*args*/, Py_ssize_t /*count*/) {
  c10::GradMode::set_enabled(reinterpret_cast<NoGrad*>(self)->wasEnabled);
  return none();
}

// What torch.profiler.record_function does, which takes 5 to 9 us also where nobody records. Its name is made where
// somebody does.
struct ProfilerRange {
  PyObject base;
  PyObject* name;
  PyObject* number;  // in the place of "{}"; or none
  std::optional<at::RecordFunction> recorded;
};

PyObject* makeRange(PyTypeObject* type, PyObject* args, PyObject* /*kwargs*/) {
  PyObject *name = nullptr, *number = nullptr;
  if (PyArg_ParseTuple(args, "U|O!", &name, &PyLong_Type, &number) == 0) return nullptr;
  PyObject* made = type->tp_alloc(type, 0);
  if (made == nullptr) return nullptr;
  auto* range = reinterpret_cast<ProfilerRange*>(made);
  range->name = Py_NewRef(name);
  range->number = Py_XNewRef(number);
  new (&range->recorded) std::optional<at::RecordFunction>();
  return made;
}

void freeRange(PyObject* self) {
  auto* range = reinterpret_cast<ProfilerRange*>(self);
  range->recorded.~optional();
  Py_XDECREF(range->name);
  Py_XDECREF(range->number);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);  // each object holds it
}

std::string nameOf(const ProfilerRange& range) {
  auto name = py::handle(range.name).cast<std::string>();
  const auto place = range.number == nullptr ? std::string::npos : name.find("{}");
  if (place != std::string::npos) name.replace(place, 2, py::str(py::handle(range.number)).cast<std::string>());
  return name;
}

PyObject* enterRange(PyObject* self, PyObject* /*unused*/) {
  auto* range = reinterpret_cast<ProfilerRange*>(self);
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return none();
  try {
    range->recorded.emplace(std::move(*callbacks));
    range->recorded->before(nameOf(*range));
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return none();
}

PyObject* exitRange(PyObject* self, PyObject* const* /*args*/, Py_ssize_t /*count*/) {
  reinterpret_cast<ProfilerRange*>(self)->recorded.reset();
  return none();
}

using Exit = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

// The methods of a type, which last as long as it does.
template <PyCFunction kEnter, Exit kExit>
PyMethodDef* methods() {
  static PyMethodDef all[] = {
      {"__enter__", kEnter, METH_NOARGS, nullptr},
      {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(kExit)), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  return all;
}

template <typename Object>
void addType(py::module_& module, const char* name, std::vector<PyType_Slot> slots) {
  slots.push_back({0, nullptr});
  PyType_Spec spec = {name, sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots.data()};
  auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  module.add_object(std::strrchr(name, '.') + 1, type);
}

template <typename Function>
void* slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

void bindStepContexts(py::module_& module) {
  addType<Nothing>(module, "farandole._C.Nothing",
                   {{Py_tp_methods, methods<enterNothing, exitNothing>()}, {Py_tp_call, slot(&callNothing)}});
  addType<NoGrad>(module, "farandole._C.NoGrad", {{Py_tp_methods, methods<enterNoGrad, exitNoGrad>()}});
  addType<ProfilerRange>(module, "farandole._C.ProfilerRange",
                         {{Py_tp_methods, methods<enterRange, exitRange>()},
                          {Py_tp_new, slot(&makeRange)},
                          {Py_tp_dealloc, slot(&freeRange)}});
}

}  // namespace farandole::python
