#include "bindings/csrc/pipeline_executor.h"

#include <c10/util/ScopeExit.h>

#include <chrono>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/csrc/owned_objects.h"
#include "bindings/csrc/python_stage.h"
#include "pipeline/runtime/executor.h"

namespace py = pybind11;

namespace farandole::python {

namespace {

using DeclaredTensors = std::vector<std::pair<std::vector<std::int64_t>, at::ScalarType>>;

std::optional<std::vector<pipeline::TensorMeta>> toMetas(const std::optional<DeclaredTensors>& declared) {
  if (!declared) return std::nullopt;
  std::vector<pipeline::TensorMeta> metas;
  for (const auto& [sizes, dtype] : *declared) metas.push_back({sizes, dtype, false});
  return metas;
}

// Its end takes the GIL, unlike that of a py::object.
std::shared_ptr<py::object> sharedObject(py::object object) {
  return {new py::object(std::move(object)), [](py::object* last) {
            const py::gil_scoped_acquire gil;
            delete last;
          }};
}

std::function<std::function<void()>()> toWeightBackward(std::shared_ptr<py::object> dwBuilder) {
  return [builder = std::move(dwBuilder)]() -> std::function<void()> {
    const py::gil_scoped_acquire gil;
    py::object runner = (*builder)();
    if (!PyCallable_Check(runner.ptr())) {
      throw std::runtime_error("dw_builder returned a " + std::string(Py_TYPE(runner.ptr())->tp_name) +
                               ", expected a callable");
    }
    return [shared = sharedObject(std::move(runner))] {
      const py::gil_scoped_acquire taken;
      (*shared)();
    };
  };
}

std::shared_ptr<PythonStage> makeStage(int index, bool isFirst, bool isLast, py::object module, py::object lossFn,
                                       const std::optional<DeclaredTensors>& inputs,
                                       const std::optional<DeclaredTensors>& outputs,
                                       std::map<std::int32_t, std::vector<std::int32_t>> outputsTo,
                                       const py::object& requireGradSync, const py::object& abandonGradSync,
                                       const py::object& dwBuilder, const py::object& finishGradSync, bool isNeverSplit,
                                       const py::object& aroundBackward) {
  pipeline::StageSpec spec;
  spec.index = index;
  spec.declaredInputs = toMetas(inputs);
  spec.declaredOutputs = toMetas(outputs);
  spec.outputsTo = std::move(outputsTo);
  spec.packets = std::make_shared<pipeline::PacketNotes>();
  std::vector<std::shared_ptr<py::object>> callables;
  const auto kept = [&](const py::object& callable) { return callables.emplace_back(sharedObject(callable)); };
  if (!aroundBackward.is_none()) {
    spec.aroundBackward = [callable = kept(aroundBackward)](int microbatch, bool begins) {
      const py::gil_scoped_acquire gil;
      (*callable)(microbatch, begins);
    };
  }
  if (!requireGradSync.is_none()) {
    spec.requireGradSync = [callable = kept(requireGradSync)](bool required) {
      const py::gil_scoped_acquire gil;
      (*callable)(required);
    };
  }
  if (!abandonGradSync.is_none()) {
    spec.abandonGradSync = [callable = kept(abandonGradSync)](const std::string& reason) {
      const py::gil_scoped_acquire gil;
      const py::error_scope current;  // the error that is the reason may be the thread's pending one
      try {
        (*callable)(reason);
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("abandoning the reduction of gradients");
      }
    };
  }
  spec.isNeverSplit = isNeverSplit;
  if (!finishGradSync.is_none()) {
    spec.finishGradSync = [callable = kept(finishGradSync)] {
      const py::gil_scoped_acquire gil;
      (*callable)();
    };
  }
  if (!dwBuilder.is_none()) spec.buildWeightBackward = toWeightBackward(kept(dwBuilder));
  return std::make_shared<PythonStage>(std::move(spec), std::move(callables), isFirst, isLast, std::move(module),
                                       std::move(lossFn));
}

[[noreturn]] void raiseFrom(const Status& status, const py::object& cause) {
  // What is no Exception (KeyboardInterrupt, SystemExit) must reach its handler as it is.
  if (cause && !PyErr_GivenExceptionMatches(cause.ptr(), PyExc_Exception)) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(cause.ptr())), cause.ptr());
    throw py::error_already_set();
  }
  py::object error = py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(status.toString());
  if (cause) PyException_SetCause(error.ptr(), py::object(cause).release().ptr());
  PyErr_SetObject(PyExc_RuntimeError, error.ptr());
  throw py::error_already_set();
}

// farandole::pipeline::Executor for Python. Used by one thread at a time.
class PythonExecutor {
 public:
  PythonExecutor(const pipeline::Plan& plan, int rank, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                 const std::vector<std::shared_ptr<PythonStage>>& stages, double lossScale, std::string description,
                 std::string rankName, bool areShapesDeclared, std::uint64_t alike, bool checksForNan,
                 at::Device device, bool hasOneQueue)
      : stages_(stages) {
    pipeline::ExecutorConfig config;
    config.device = device;
    config.hasOneQueue = hasOneQueue;
    if (group && !device.is_cpu()) config.deviceBackend = group->getBackend(device.type());
    for (const auto& stage : stages) config.stages.push_back(PythonStage::bind(stage, &inputs_));
    config.lossScale = lossScale;
    config.description = std::move(description);
    config.rankName = std::move(rankName);
    config.areShapesDeclared = areShapesDeclared;
    config.alike = alike;
    config.checksForNan = checksForNan;
    config.describeError = [this] { return raised_.describe(); };
    config.notify = [](const std::string& text) {
      const py::gil_scoped_acquire gil;
      if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) != 0) throw py::error_already_set();
    };
    const auto backend = group ? group->getBackend(c10::DeviceType::CPU) : c10::intrusive_ptr<c10d::Backend>();
    auto executor = pipeline::Executor::create(plan, rank, backend, std::move(config));
    if (!executor) throw py::value_error(executor.status().toString());
    executor_ = std::move(executor).value();
  }

  void step(py::object args, py::object kwargs, py::object targets, py::object lossKwargs, py::object outputs,
            py::object losses, bool relearn, const py::object& lossScales, bool isCaptured) {
    if (running_) throw std::runtime_error("step() was called from within a step of the same schedule");
    running_ = true;
    const auto ended = c10::make_scope_exit([this] {
      inputs_ = {};
      running_ = false;
    });
    inputs_ = {std::move(args),       std::move(kwargs),  std::move(targets),
               std::move(lossKwargs), std::move(outputs), std::move(losses)};
    raised_.clear();
    lossScales_.clear();
    if (!lossScales.is_none()) {
      for (const py::handle scale : lossScales) lossScales_.push_back(scale.cast<double>());
    }
    Status status;
    {
      const py::gil_scoped_release released;
      began_ = std::chrono::steady_clock::now();
      status = executor_->step(relearn, lossScales_, isCaptured);
    }
    if (!status.isOk()) raise(status);
  }

  void refuse(std::string reason) {
    vote([&] { return executor_->refuse(std::move(reason)); });
  }

  void confirm() {
    vote([&] { return executor_->confirm(); });
  }

  void releaseBuffers() { executor_->releaseBuffers(); }

  // When the last step began, on the clock of Python's time.monotonic().
  double lastStepBegan() const { return std::chrono::duration<double>(began_.time_since_epoch()).count(); }

  py::list lastStepTrace() const { return texts(executor_->lastTrace()); }

  void timeOnDevice(bool isTimed) { executor_->timeOnDevice(isTimed); }

  // (actions, seconds of the step, seconds in which it computed), or None.
  py::object lastDeviceTrace() {
    const auto trace = [this] {
      const py::gil_scoped_release released;
      return executor_->lastDeviceTrace();
    }();
    if (!trace) return py::none();
    return py::make_tuple(texts(*trace), trace->seconds, trace->computeSeconds);
  }

  // [(from, to, bytes of each tensor, bytes of each gradient)] of the edges that begin on this rank.
  py::list edgeSizes() {
    py::list edges;
    for (const pipeline::EdgeSizes& sizes : executor_->edgeSizes()) {
      edges.append(py::make_tuple(sizes.edge.from, sizes.edge.to, sizes.activation, sizes.gradient));
    }
    return edges;
  }

  int visit(visitproc visit, void* arg) const {
    for (const auto& stage : stages_) {
      if (const int stop = stage->visit(visit, arg); stop != 0) return stop;
    }
    return 0;
  }

  double lastStepSeconds() const { return executor_->lastTrace().seconds; }
  double lastComputeSeconds() const { return executor_->lastTrace().computeSeconds; }

 private:
  template <typename Function>
  void vote(const Function& function) {
    if (running_) throw std::runtime_error("step() was called from within a step of the same schedule");
    raised_.clear();
    Status status;
    {
      const py::gil_scoped_release released;
      status = function();
    }
    if (!status.isOk()) raise(status);
  }

  // [(action, start, end)] in seconds.
  py::list texts(const pipeline::StepTrace& trace) const {
    py::list actions;
    for (const pipeline::TimedInstruction& time : trace.instructions) {
      actions.append(py::make_tuple(executor_->program().labels[time.instruction], time.start, time.end));
    }
    return actions;
  }

  [[noreturn]] void raise(const Status& status) {
    const py::object cause = raised_.first();
    raised_.clear();
    raiseFrom(status, cause);
  }

  const std::vector<std::shared_ptr<PythonStage>> stages_;  // whose Python objects are gone once this is made
  bool running_ = false;
  std::chrono::steady_clock::time_point began_;
  StepInputs inputs_;
  std::vector<double> lossScales_;
  RaisedError raised_;
  std::unique_ptr<pipeline::Executor> executor_;
};

// Of a rank that has no executor: the others learn why from the beginning of their step.
void refuseStep(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& reason,
                std::optional<double> patience) {
  const py::gil_scoped_release released;
  const auto limit = patience ? std::chrono::milliseconds(static_cast<std::int64_t>(*patience * 1e3)) : kNoTimeout;
  pipeline::refuseStep(group->getBackend(c10::DeviceType::CPU), reason, limit);
}

}  // namespace

void bindPipelineExecutor(py::module_& module) {
  module.def("refuse_pipeline_step", &refuseStep, py::arg("group"), py::arg("reason"),
             py::arg("patience") = py::none());
  py::class_<PythonStage, std::shared_ptr<PythonStage>>(module, "PipelineStage")
      .def(py::init(&makeStage), py::kw_only(), py::arg("index"), py::arg("is_first"), py::arg("is_last"),
           py::arg("module"), py::arg("loss_fn"), py::arg("declared_inputs"), py::arg("declared_outputs"),
           py::arg("outputs_to"), py::arg("require_grad_sync"), py::arg("abandon_grad_sync"),
           py::arg("dw_builder") = py::none(), py::arg("finish_grad_sync") = py::none(),
           py::arg("is_never_split") = false, py::arg("around_backward") = py::none());
  py::class_<PythonExecutor>(module, "PipelineExecutor", visitsOwnedObjects<PythonExecutor>())
      .def(py::init<const pipeline::Plan&, int, const c10::intrusive_ptr<c10d::ProcessGroup>&,
                    const std::vector<std::shared_ptr<PythonStage>>&, double, std::string, std::string, bool,
                    std::uint64_t, bool, at::Device, bool>(),
           py::kw_only(), py::arg("plan"), py::arg("rank"), py::arg("group").none(true), py::arg("stages"),
           py::arg("loss_scale"), py::arg("description"), py::arg("rank_name"), py::arg("shapes_declared") = false,
           py::arg("alike") = 0, py::arg("checks_for_nan") = false, py::arg("device") = at::Device(at::kCPU),
           py::arg("one_queue") = false)
      .def("step", &PythonExecutor::step, py::kw_only(), py::arg("args"), py::arg("kwargs"), py::arg("targets"),
           py::arg("loss_kwargs"), py::arg("outputs"), py::arg("losses"), py::arg("relearn"),
           py::arg("loss_scales") = py::none(), py::arg("captured") = false)
      .def("refuse", &PythonExecutor::refuse, py::arg("reason"))
      .def("confirm", &PythonExecutor::confirm)
      .def("release_buffers", &PythonExecutor::releaseBuffers)
      .def("edge_sizes", &PythonExecutor::edgeSizes)
      .def("last_step_trace", &PythonExecutor::lastStepTrace)
      .def("time_on_device", &PythonExecutor::timeOnDevice, py::arg("timed"))
      .def("last_device_trace", &PythonExecutor::lastDeviceTrace)
      .def_property_readonly("last_step_began", &PythonExecutor::lastStepBegan)
      .def_property_readonly("last_step_seconds", &PythonExecutor::lastStepSeconds)
      .def_property_readonly("last_compute_seconds", &PythonExecutor::lastComputeSeconds);
}

}  // namespace farandole::python
