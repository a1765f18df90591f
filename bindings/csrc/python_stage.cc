#include "bindings/csrc/python_stage.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "pipeline/runtime/executor_config.h"
#include "pipeline/runtime/shape_exchange.h"

namespace py = pybind11;

namespace farandole::python {

namespace {

std::string typeName(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

std::string textOf(py::handle error) { return typeName(error) + ": " + std::string(py::str(error)); }

// The pending Python error, cleared; null when there is none.
py::object takePendingError() {
  if (!PyErr_Occurred()) return {};
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return py::reinterpret_steal<py::object>(value);
}

py::object wrapped(const at::Tensor& tensor) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)); }

// Of the Python side of packets, for what is not only tensors.
py::object packetFunction(const char* name) { return py::module_::import("farandole.pipelining._packets").attr(name); }

bool isSequence(py::handle object) { return PyTuple_Check(object.ptr()) || PyList_Check(object.ptr()); }

// Outputs for the user live on after the step: without their graph.
py::object detached(py::handle output) {
  if (THPVariable_Check(output.ptr())) return wrapped(THPVariable_Unpack(output.ptr()).detach());
  if (isSequence(output) ? !PyTuple_CheckExact(output.ptr()) && !PyList_CheckExact(output.ptr())
                         : PyDict_Check(output.ptr())) {
    return packetFunction("detached")(output);
  }
  if (!PyTuple_CheckExact(output.ptr()) && !PyList_CheckExact(output.ptr())) {
    return py::reinterpret_borrow<py::object>(output);
  }
  py::list items;
  for (py::handle item : output) items.append(detached(item));
  return PyTuple_CheckExact(output.ptr()) ? py::object(py::tuple(items)) : py::object(items);
}

py::object call(py::handle callable, py::handle args, py::handle kwargs) {
  PyObject* result = PyObject_Call(callable.ptr(), args.ptr(), kwargs.is_none() ? nullptr : kwargs.ptr());
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// list[index], borrowed; the lists of a step have one entry per microbatch.
py::handle at(const py::object& list, int index) { return PyList_GET_ITEM(list.ptr(), index); }

// False, and none, where there is more than tensors.
bool appendTensors(const py::object& result, std::vector<at::Tensor>& outputs) {
  if (THPVariable_Check(result.ptr())) {
    outputs.push_back(THPVariable_Unpack(result.ptr()));
    return true;
  }
  if (!isSequence(result)) return false;
  for (py::handle item : result) {
    if (!THPVariable_Check(item.ptr())) {
      outputs.clear();
      return false;
    }
    outputs.push_back(THPVariable_Unpack(item.ptr()));
  }
  return true;
}

// The tensors wherever they are; what is returned is the rest.
py::bytes pack(const py::object& result, std::vector<at::Tensor>& outputs) {
  const py::tuple packed = packetFunction("pack")(result);
  for (py::handle item : packed[0]) outputs.push_back(THPVariable_Unpack(item.ptr()));
  return packed[1];
}

py::object unpack(const at::Tensor& packet, const py::list& tensors) {
  const py::bytes data(static_cast<const char*>(packet.data_ptr()), packet.numel());
  return packetFunction("unpack")(data, tensors);
}

py::tuple tupleOf(const std::vector<at::Tensor>& tensors) {
  py::tuple tuple(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) PyTuple_SET_ITEM(tuple.ptr(), i, THPVariable_Wrap(tensors[i]));
  return tuple;
}

// A stage before gives its tensors, or what was in its packet: several arguments if that is a sequence.
py::tuple argumentsOf(const std::vector<at::Tensor>& inputs, const std::vector<pipeline::PacketNotes::Input>& edges) {
  py::list args;
  auto next = inputs.begin();
  for (const pipeline::PacketNotes::Input& edge : edges) {
    py::list tensors;
    for (const auto end = next + edge.numTensors - (edge.hasPacket ? 1 : 0); next != end; ++next) {
      tensors.append(wrapped(*next));
    }
    py::object given = edge.hasPacket ? unpack(*next++, tensors) : py::object(tensors);
    if (isSequence(given)) {
      for (py::handle item : given) args.append(item);
    } else {
      args.append(given);
    }
  }
  return py::tuple(args);
}

}  // namespace

std::string RaisedError::describe() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    const py::gil_scoped_acquire gil;
    py::object value = error.value();
    if (error.trace()) PyException_SetTraceback(value.ptr(), error.trace().ptr());
    std::string text = textOf(value);
    keep(std::move(value));
    return text;
  } catch (python_error& error) {
    // Out of the autograd engine: the Python error is in the exception, or was
    // already put back as the thread's pending one.
    const py::gil_scoped_acquire gil;
    if (error.type != nullptr) error.restore();
    py::object value = takePendingError();
    if (!value) return error.what();
    std::string text = textOf(value);
    keep(std::move(value));
    return text;
  } catch (...) {
    return pipeline::describeCurrentError();
  }
}

void RaisedError::keep(py::object error) {
  if (!first_) first_ = std::move(error);
}

pipeline::StageSpec PythonStage::bind(const std::shared_ptr<PythonStage>& stage, const StepInputs* inputs) {
  pipeline::StageSpec spec = stage->spec_;
  spec.forward = [stage, inputs](int microbatch, const std::vector<at::Tensor>& tensors,
                                 std::vector<at::Tensor>& outputs) {
    const py::gil_scoped_acquire gil;
    stage->forward(*inputs, microbatch, tensors, outputs);
  };
  return spec;
}

void PythonStage::forward(const StepInputs& step, int microbatch, const std::vector<at::Tensor>& inputs,
                          std::vector<at::Tensor>& outputs) const {
  py::object args;
  if (isFirst_) {
    args = py::reinterpret_borrow<py::object>(at(step.args, microbatch));
  } else {
    const auto& packets = spec_.packets->inputs;
    args = packets.empty() ? tupleOf(inputs) : argumentsOf(inputs, packets);
  }
  const py::handle kwargs = step.kwargs.is_none() ? py::handle(Py_None) : at(step.kwargs, microbatch);
  py::object result = call(module_, args, kwargs);
  if (isLast_) return finish(step, microbatch, std::move(result), outputs);
  if (appendTensors(result, outputs)) return;
  const py::bytes rest = pack(result, outputs);
  outputs.push_back(pipeline::makePacket(PyBytes_AS_STRING(rest.ptr()), PyBytes_GET_SIZE(rest.ptr())));
  spec_.packets->returned = true;
}

// The executor does this for a stage that sends; what the last one returns never reaches it.
int PythonStage::visit(visitproc visit, void* arg) const {
  for (const auto& callable : callables_) Py_VISIT(callable->ptr());
  Py_VISIT(module_.ptr());
  Py_VISIT(lossFn_.ptr());
  return 0;
}

void PythonStage::checkOutputs(const py::object& result) const {
  std::vector<at::Tensor> tensors;
  if (!appendTensors(result, tensors)) pack(result, tensors);
  std::vector<pipeline::TensorMeta> metas;
  for (const at::Tensor& tensor : tensors) metas.push_back(pipeline::TensorMeta::of(tensor));
  const Status status = pipeline::checkDeclared("outputs", *spec_.declaredOutputs, metas);
  if (!status.isOk()) throw std::runtime_error(std::string(status.message()));
}

void PythonStage::finish(const StepInputs& step, int microbatch, const py::object& result,
                         std::vector<at::Tensor>& outputs) const {
  if (spec_.declaredOutputs) checkOutputs(result);
  if (!step.outputs.is_none()) {
    PyList_SetItem(step.outputs.ptr(), microbatch, detached(result).release().ptr());
  }
  if (lossFn_.is_none() || step.targets.is_none()) return;
  const py::tuple args = py::make_tuple(result, at(step.targets, microbatch));
  const py::object loss = call(lossFn_, args, step.lossKwargs);
  if (!THPVariable_Check(loss.ptr())) {
    throw std::runtime_error("loss_fn returned a " + typeName(loss) + ", expected a tensor of one element");
  }
  const at::Tensor& tensor = THPVariable_Unpack(loss.ptr());
  if (tensor.numel() != 1) {
    throw std::runtime_error("loss_fn returned a tensor of shape " + c10::str(tensor.sizes()) +
                             ", expected a tensor of one element");
  }
  if (!step.losses.is_none()) {
    PyList_SetItem(step.losses.ptr(), microbatch, THPVariable_Wrap(tensor.detach()));
  }
  outputs.push_back(tensor);
}

}  // namespace farandole::python
