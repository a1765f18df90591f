#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/csrc/layers.h"
#include "ddp/abandonment.h"
#include "ddp/grad_reducer.h"

namespace farandole::python {
namespace {

namespace py = pybind11;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

std::vector<ddp::NamedTensor> toNamedTensors(const NamedTensors& tensors) {
  std::vector<ddp::NamedTensor> result;
  for (const auto& [name, tensor] : tensors) result.push_back({name, tensor});
  return result;
}

std::shared_ptr<ddp::GradReducer> createReducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                const NamedTensors& parameters, const NamedTensors& buffers,
                                                std::optional<int64_t> bucketSize, ddp::UnusedParameters unused) {
  return ddp::GradReducer::create(group, {toNamedTensors(parameters), toNamedTensors(buffers)}, {bucketSize, unused});
}

NamedTensors mainGrads(const ddp::GradReducer& reducer) {
  NamedTensors result;
  for (size_t i = 0; i < reducer.parameters().size(); ++i) {
    result.emplace_back(reducer.parameters()[i].name, reducer.mainGrads()[i]);
  }
  return result;
}

}  // namespace

void bindDdp(py::module_& module) {
  py::enum_<ddp::UnusedParameters>(module, "UnusedParameters")
      .value("error", ddp::UnusedParameters::kError)
      .value("zero_fill", ddp::UnusedParameters::kZeroFill);

  module.def(
      "abandon_group",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& why) {
        ddp::abandonGroup(*group, why);
      },
      py::arg("group"), py::arg("why"), ReleaseGil());

  py::class_<ddp::GradReducer, std::shared_ptr<ddp::GradReducer>>(module, "GradReducer")
      .def(py::init(&createReducer), py::arg("group"), py::arg("parameters"), py::arg("buffers"),
           py::arg("bucket_size"), py::arg("unused_parameters"), ReleaseGil())
      .def("set_require_sync", &ddp::GradReducer::setRequireSync, py::arg("require_sync"), ReleaseGil())
      .def("prepare_forward", &ddp::GradReducer::prepareForward, py::arg("require_sync"), ReleaseGil())
      .def("abandon", &ddp::GradReducer::abandon, py::arg("why"), ReleaseGil())
      .def("begin_step", &ddp::GradReducer::beginStep, ReleaseGil())
      .def("is_synchronized", &ddp::GradReducer::isSynchronized, ReleaseGil())
      .def("start_sync", &ddp::GradReducer::startSync, ReleaseGil())
      .def("finish_sync", &ddp::GradReducer::finishSync, ReleaseGil())
      .def("zero_grad_buffers", &ddp::GradReducer::zeroGradBuffers, ReleaseGil())
      .def("main_grads", &mainGrads)
      .def("layout", [](const ddp::GradReducer& reducer) { return ddp::toString(reducer.layout()); });
}

}  // namespace farandole::python
