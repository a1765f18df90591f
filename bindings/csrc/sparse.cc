#include <optional>

#include "bindings/csrc/layers.h"
#include "bindings/csrc/owned_objects.h"
#include "bindings/csrc/step_checks.h"
#include "bindings/csrc/step_contexts.h"
#include "pipeline/sparse/accumulation_window.h"
#include "pipeline/sparse/batch_pipeline.h"
#include "pipeline/sparse/freed_memory.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace farandole::python {

namespace {

namespace sparse = pipeline::sparse;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// Interned, as names in Python's own code are; for good.
struct StageNames {
  PyObject* load = PyUnicode_InternFromString("load");
  PyObject* startDist = PyUnicode_InternFromString("start_dist");
  PyObject* finishDist = PyUnicode_InternFromString("finish_dist");
  PyObject* completeDist = PyUnicode_InternFromString("complete_dist");
  PyObject* agreeOnMore = PyUnicode_InternFromString("agree_on_more");
  PyObject* discard = PyUnicode_InternFromString("discard");
};

const StageNames& stageNames() {
  static const StageNames names;
  return names;
}

// The stages as a Python object has them; called with the GIL or without it, by any thread.
class PythonStages : public sparse::BatchStages {
 public:
  explicit PythonStages(py::object stages)
      : stages_(std::move(stages)), presences_(py::module_::import("farandole._C").attr("Presence")) {}
  ~PythonStages() override {
    const py::gil_scoped_acquire gil;
    stages_ = py::object();
    presences_.release().dec_ref();
  }
  PythonStages(const PythonStages&) = delete;
  PythonStages& operator=(const PythonStages&) = delete;

  sparse::Loaded load(sparse::BatchNo batch) override {
    return call<bool>(names_.load, batch) ? sparse::Loaded::kBatch : sparse::Loaded::kEndOfData;
  }
  void startDist(sparse::BatchNo batch, sparse::Presence presence) override {
    call<void>(names_.startDist, batch, presence);
  }
  sparse::Exchanged finishDist(sparse::BatchNo batch) override {
    return call<bool>(names_.finishDist, batch) ? sparse::Exchanged::kBatch : sparse::Exchanged::kEndOfData;
  }
  void completeDist(sparse::BatchNo batch) override { call<void>(names_.completeDist, batch); }
  bool agreeOnMore(bool hasMore) override { return call<bool>(names_.agreeOnMore, hasMore); }
  void discard(sparse::BatchNo batch, bool hasFailed) override { call<void>(names_.discard, batch, hasFailed); }
  // One state of the interpreter for all calls of the task, and the GIL from one to the next.
  void onThread(const std::function<void()>& task) override {
    const py::gil_scoped_acquire gil;
    task();
  }
  int visit(visitproc visit, void* arg) const {
    Py_VISIT(stages_.ptr());
    return 0;
  }
  void checkInterrupts() override {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }

 private:
  template <typename Result, typename... Arguments>
  Result call(PyObject* name, const Arguments&... arguments) {
    const py::gil_scoped_acquire gil;
    const auto result = py::reinterpret_steal<py::object>(
        PyObject_CallMethodObjArgs(stages_.ptr(), name, toPython(arguments).ptr()..., static_cast<PyObject*>(nullptr)));
    if (!result) throw py::error_already_set();
    if constexpr (!std::is_void_v<Result>) return result.template cast<Result>();
  }

  template <typename Value>
  py::object toPython(const Value& value) const {
    if constexpr (std::is_same_v<Value, sparse::Presence>) {
      return presences_[static_cast<std::size_t>(value)];
    } else {
      return py::cast(value);
    }
  }

  py::object stages_;
  py::list presences_;  // by value
  const StageNames& names_ = stageNames();
};

sparse::ThreadUse toUse(std::optional<bool> onThread) {
  if (!onThread) return sparse::ThreadUse::kAsMeasured;
  return *onThread ? sparse::ThreadUse::kAlways : sparse::ThreadUse::kNever;
}

class PythonPipeline : public sparse::BatchPipeline {
 public:
  PythonPipeline(std::shared_ptr<PythonStages> stages, const sparse::BatchPipelineOptions& options)
      : BatchPipeline(stages, options), stages_(std::move(stages)) {}

  int visit(visitproc visit, void* arg) const { return stages_->visit(visit, arg); }

 private:
  const std::shared_ptr<const PythonStages> stages_;
};

// Its end waits for threads that may want the GIL.
void deleteWithoutGil(PythonPipeline* pipeline) {
  const py::gil_scoped_release released;
  delete pipeline;
}

std::shared_ptr<PythonPipeline> makePipeline(py::object stages, bool executeAllBatches, bool hasDist,
                                             bool completesAhead, std::optional<bool> loadOnThread,
                                             std::optional<bool> distOnThread) {
  sparse::BatchPipelineOptions options;
  options.executeAllBatches = executeAllBatches;
  options.hasDist = hasDist;
  options.completesAhead = completesAhead;
  options.loadThread = toUse(loadOnThread);
  options.distThread = toUse(distOnThread);
  return {new PythonPipeline(std::make_shared<PythonStages>(std::move(stages)), options), deleteWithoutGil};
}

}  // namespace

void bindSparse(py::module_& module) {
  // Not an enum of pybind11's, which compares by calls.
  const auto values = py::dict("BATCH"_a = static_cast<int>(sparse::Presence::kBatch),
                               "END_OF_DATA"_a = static_cast<int>(sparse::Presence::kEndOfData),
                               "FAILED"_a = static_cast<int>(sparse::Presence::kFailed));
  module.attr("Presence") =
      py::module_::import("enum").attr("IntEnum")("Presence", values, "module"_a = "farandole._C");

  bindStepContexts(module);
  bindStepChecks(module);

  module.def("keep_freed_memory", &sparse::keepFreedMemory);

  py::class_<sparse::AccumulationWindow>(module, "AccumulationWindow")
      .def(py::init<std::int64_t>(), py::arg("size"))
      .def_property_readonly("size", &sparse::AccumulationWindow::size)
      .def_property_readonly("filled", &sparse::AccumulationWindow::filled)
      .def_property_readonly("is_first", &sparse::AccumulationWindow::isFirst)
      .def_property_readonly("is_last", &sparse::AccumulationWindow::isLast)
      .def("add", &sparse::AccumulationWindow::add)
      .def("close", &sparse::AccumulationWindow::close);

  py::class_<PythonPipeline, std::shared_ptr<PythonPipeline>>(module, "BatchPipeline",
                                                              visitsOwnedObjects<PythonPipeline>())
      .def(py::init(&makePipeline), py::arg("stages"), py::kw_only(), py::arg("execute_all_batches") = true,
           py::arg("has_dist") = true, py::arg("completes_ahead") = false, py::arg("load_on_thread") = py::none(),
           py::arg("dist_on_thread") = py::none())
      .def("begin", &sparse::BatchPipeline::begin, py::arg("is_new_source"), ReleaseGil())
      // With the GIL: threads would take it, and keep the forward or backward waiting that is to follow.
      .def("beside", &sparse::BatchPipeline::beside, py::arg("may_dist_beside"), py::arg("may_load_beside") = true)
      .def(
          "wait_for_data", [](PythonPipeline& self, const py::function& wait) { self.waitForData([&] { wait(); }); },
          py::arg("wait"))
      .def("middle", &sparse::BatchPipeline::middle)
      .def("end", &sparse::BatchPipeline::end, ReleaseGil())
      .def("clear", &sparse::BatchPipeline::clear, ReleaseGil())
      .def("set_executes_all_batches", &sparse::BatchPipeline::setExecutesAllBatches, py::arg("executes_all"),
           ReleaseGil())
      .def_property_readonly("in_flight", &sparse::BatchPipeline::inFlight)
      .def_property_readonly("load_on_thread", [](const PythonPipeline& self) { return self.threads().loadOnThread(); })
      .def_property_readonly("dist_on_thread",
                             [](const PythonPipeline& self) { return self.threads().distOnThread(); });
}

}  // namespace farandole::python
