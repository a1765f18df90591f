#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/csrc/layers.h"
#include "bindings/csrc/planning_errors.h"
#include "ddp/abandonment.h"
#include "ddp/bucket_tuning.h"
#include "ddp/grad_reducer.h"
#include "ddp/graph_reads.h"
#include "ddp/param_gather.h"
#include "ddp/row_exchange.h"
#include "ddp/tensor_exchange.h"
#include "ddp/timeline.h"

namespace farandole::python {
namespace {

namespace py = pybind11;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// (name, tensor, is an expert, is a shared embedding)
using Parameters = std::vector<std::tuple<std::string, at::Tensor, bool, bool>>;

// (process group, group across optimizer instances or None)
using PyReplicas = std::pair<ddp::Group, std::optional<ddp::Group>>;

ddp::Model toModel(const Parameters& parameters, const NamedTensors& buffers) {
  ddp::Model model;
  for (const auto& [name, tensor, isExpert, isShared] : parameters) {
    model.parameters.push_back({name, tensor, isExpert, isShared});
  }
  for (const auto& [name, tensor] : buffers) model.buffers.push_back({name, tensor});
  return model;
}

ddp::DataParallelGroups toGroups(const PyReplicas& dense, const PyReplicas& experts) {
  return {{dense.first, dense.second.value_or(nullptr)}, {experts.first, experts.second.value_or(nullptr)}};
}

// One bucket as Python sees it: what the distributed optimizer needs to find its part.
struct Bucket {
  at::Tensor grads;
  std::optional<at::Tensor> parameters;
  bool isExpert;
  std::vector<std::tuple<int, int64_t, int64_t>> slots;  // (parameter, offset in the bucket, elements)
};

std::vector<Bucket> bucketsOf(const ddp::GradReducer& reducer) {
  const ddp::ModelBuffers& buffers = *reducer.buffers();
  const ddp::Layout& layout = buffers.layout();
  std::vector<Bucket> buckets;
  for (size_t b = 0; b < layout.buckets.size(); ++b) {
    const ddp::BucketLayout& range = layout.buckets[b];
    const int index = static_cast<int>(b);
    Bucket bucket{buffers.gradsOf(index), std::nullopt, layout.buffers[range.buffer].isExpert, {}};
    if (buffers.isSharded()) bucket.parameters = buffers.parametersOf(index);
    for (int parameter : range.parameters) {
      const ddp::Slot& slot = layout.slots[parameter];
      bucket.slots.emplace_back(parameter, slot.offset - range.begin, slot.numel);
    }
    buckets.push_back(std::move(bucket));
  }
  return buckets;
}

NamedTensors mainGrads(const ddp::GradReducer& reducer) {
  const ddp::ModelBuffers& buffers = *reducer.buffers();
  NamedTensors result;
  for (size_t i = 0; i < buffers.parameters().size(); ++i) {
    result.emplace_back(buffers.parameters()[i].name, buffers.mainGrads()[i]);
  }
  return result;
}

void bindOptions(py::module_& module) {
  py::enum_<ddp::UnusedParameters>(module, "UnusedParameters")
      .value("error", ddp::UnusedParameters::kError)
      .value("error_in_used_group", ddp::UnusedParameters::kErrorInUsedGroup)
      .value("zero_fill", ddp::UnusedParameters::kZeroFill)
      .value("skip", ddp::UnusedParameters::kSkip);

  py::enum_<ddp::Gradients::Home>(module, "GradHome")
      .value("grad", ddp::Gradients::Home::kGrad)
      .value("bucket_view", ddp::Gradients::Home::kBucketView)
      .value("main_grad", ddp::Gradients::Home::kMainGrad);

  py::class_<ddp::ReducerOptions>(module, "ReducerOptions")
      .def(py::init<>())
      .def_readwrite("unused", &ddp::ReducerOptions::unused)
      .def_readwrite("overlaps", &ddp::ReducerOptions::overlaps)
      .def_readwrite("ends_with_backward", &ddp::ReducerOptions::endsWithBackward)
      .def_readwrite("is_averaged", &ddp::ReducerOptions::isAveraged)
      .def_readwrite("average_in_collective", &ddp::ReducerOptions::averageInCollective)
      .def_readwrite("accumulates_in_float", &ddp::ReducerOptions::accumulatesInFloat)
      .def_readwrite("is_graph_static", &ddp::ReducerOptions::isGraphStatic)
      .def_readwrite("broadcasts", &ddp::ReducerOptions::broadcasts)
      .def_readwrite("is_agreed", &ddp::ReducerOptions::isAgreed)
      .def_readwrite("home", &ddp::ReducerOptions::home)
      .def_property(
          "bucket_size", [](const ddp::ReducerOptions& options) { return options.buffers.bucketSize; },
          [](ddp::ReducerOptions& options, std::optional<int64_t> size) { options.buffers.bucketSize = size; })
      .def_property(
          "is_bucketed", [](const ddp::ReducerOptions& options) { return options.buffers.isBucketed; },
          [](ddp::ReducerOptions& options, bool isBucketed) { options.buffers.isBucketed = isBucketed; })
      .def_property(
          "in_one_group", [](const ddp::ReducerOptions& options) { return options.buffers.inOneGroup; },
          [](ddp::ReducerOptions& options, bool inOneGroup) { options.buffers.inOneGroup = inOneGroup; })
      .def_property(
          "grad_dtype", [](const ddp::ReducerOptions& options) { return options.buffers.gradType; },
          [](ddp::ReducerOptions& options, std::optional<at::ScalarType> type) { options.buffers.gradType = type; })
      .def_property(
          "is_sharded", [](const ddp::ReducerOptions& options) { return options.buffers.sharded; },
          [](ddp::ReducerOptions& options, bool sharded) { options.buffers.sharded = sharded; })
      .def_property(
          "pads_for_bus_bandwidth",
          [](const ddp::ReducerOptions& options) { return options.buffers.padForBusBandwidth; },
          [](ddp::ReducerOptions& options, bool pads) { options.buffers.padForBusBandwidth = pads; })
      .def_property(
          "checks_nan", [](const ddp::ReducerOptions& options) { return options.checks.nan; },
          [](ddp::ReducerOptions& options, bool nan) { options.checks.nan = nan; })
      .def_property(
          "largest_grad", [](const ddp::ReducerOptions& options) { return options.checks.largest; },
          [](ddp::ReducerOptions& options, double largest) { options.checks.largest = largest; });
}

// (kind, index, round, start, end or None, whether the end is exact)
using TimedEvent = std::tuple<ddp::Timeline::Kind, int, int, double, std::optional<double>, bool>;

void bindTimeline(py::module_& module) {
  py::enum_<ddp::Timeline::Kind>(module, "GradEvent")
      .value("ready", ddp::Timeline::Kind::kReady)
      .value("reduction", ddp::Timeline::Kind::kReduction)
      .value("wait", ddp::Timeline::Kind::kWait)
      .value("report", ddp::Timeline::Kind::kReport)
      .value("gather", ddp::Timeline::Kind::kGather)
      .value("gather_wait", ddp::Timeline::Kind::kGatherWait);

  py::class_<ddp::Timeline, std::shared_ptr<ddp::Timeline>>(module, "GradTimeline")
      .def(py::init<>())
      .def_property_readonly("rounds", &ddp::Timeline::rounds)
      .def("events", [](const ddp::Timeline& timeline) {
        std::vector<TimedEvent> events;
        for (const auto& [kind, index, round, start, end, isExact] : timeline.events()) {
          events.emplace_back(kind, index, round, start, end == 0 ? std::nullopt : std::optional(end), isExact);
        }
        return events;
      });
}

// `ready`: by parameter, and `end` of the backward, `points`: (bytes, seconds) of a reduction, `start`: of its start.
ddp::TuningChoice chooseBucketSize(const ddp::GradReducer& reducer, std::vector<double> ready, double end,
                                   std::vector<std::pair<double, double>> points, double start) {
  const ddp::ModelBuffers& buffers = *reducer.buffers();
  ddp::TuningFacts facts;
  facts.parameters = ddp::specsOf(buffers);
  for (const at::Tensor& grad : buffers.mainGrads()) facts.gradBytes.push_back(static_cast<int>(grad.element_size()));
  facts.ready = std::move(ready);
  facts.end = end;
  facts.start = start;
  facts.layout.bucketSize = ddp::bucketSizeOf(reducer.options().buffers, reducer.groups());
  return valueOf(ddp::chooseBucketSize(facts, valueOf(ddp::ReductionCost::fromMeasured(std::move(points)))));
}

void bindTuning(py::module_& module) {
  py::class_<ddp::Prediction>(module, "BucketPrediction")
      .def_readonly("bucket_size", &ddp::Prediction::bucketSize)
      .def_readonly("buckets", &ddp::Prediction::buckets)
      .def_readonly("exposed", &ddp::Prediction::exposed);
  py::class_<ddp::TuningChoice>(module, "TuningChoice")
      .def_readonly("now", &ddp::TuningChoice::now)
      .def_readonly("best", &ddp::TuningChoice::best)
      .def_readonly("is_worthwhile", &ddp::TuningChoice::isWorthwhile)
      .def_readonly("backward", &ddp::TuningChoice::backward);
  module.def("choose_bucket_size", &chooseBucketSize, py::arg("reducer"), py::arg("ready"), py::arg("end"),
             py::arg("points"), py::arg("start"));
}

void bindReducer(py::module_& module) {
  py::class_<Bucket>(module, "GradientBucket")
      .def_readonly("grads", &Bucket::grads)
      .def_readonly("parameters", &Bucket::parameters)
      .def_readonly("is_expert", &Bucket::isExpert)
      .def_readonly("slots", &Bucket::slots);

  py::class_<ddp::GradReducer, std::shared_ptr<ddp::GradReducer>>(module, "GradReducer")
      .def(py::init([](const PyReplicas& dense, const PyReplicas& experts, const Parameters& parameters,
                       const NamedTensors& buffers, const ddp::ReducerOptions& options,
                       ddp::Gradients::IsAdded isAdded) {
             return ddp::GradReducer::create(toGroups(dense, experts), toModel(parameters, buffers), options,
                                             std::move(isAdded));
           }),
           py::arg("dense"), py::arg("experts"), py::arg("parameters"), py::arg("buffers"), py::arg("options"),
           py::arg("is_added"), ReleaseGil())
      .def("set_require_sync", &ddp::GradReducer::setRequireSync, py::arg("require_sync"), ReleaseGil())
      .def("prepare_forward", &ddp::GradReducer::prepareForward, py::arg("require_sync"), py::arg("change") = "",
           ReleaseGil())
      .def("hold_parameters", &ddp::GradReducer::holdParameters, ReleaseGil())
      .def("watch_outputs", &ddp::GradReducer::watchOutputs, py::arg("outputs"), py::arg("is_own"))
      .def("note_untrained", &ddp::GradReducer::noteUntrained, ReleaseGil())
      .def("note_trouble", &ddp::GradReducer::noteTrouble, py::arg("trouble"), ReleaseGil())
      .def("fail_round", &ddp::GradReducer::failRound, py::arg("trouble"), ReleaseGil())
      .def("average_over", &ddp::GradReducer::averageOver, py::arg("replicas"), ReleaseGil())
      .def("shadow_round", &ddp::GradReducer::shadowRound, ReleaseGil())
      .def("abandon", &ddp::GradReducer::abandon, py::arg("why"), ReleaseGil())
      .def("follow", &ddp::GradReducer::follow, py::arg("other"), ReleaseGil())
      .def("begin_step", &ddp::GradReducer::beginStep, ReleaseGil())
      .def("is_synchronized", &ddp::GradReducer::isSynchronized, ReleaseGil())
      .def(
          "register_comm_hook",
          [](ddp::GradReducer& reducer, py::object state, py::object hook) {
            auto wrapped = std::make_shared<c10d::PythonCommHook>(std::move(state), std::move(hook));
            py::gil_scoped_release release;
            reducer.setCommHook(std::move(wrapped));
          },
          py::arg("state"), py::arg("hook"))
      .def("start_sync", &ddp::GradReducer::startSync, ReleaseGil())
      .def("finish_sync", &ddp::GradReducer::finishSync, ReleaseGil())
      .def("set_graph_static", &ddp::GradReducer::setGraphStatic, py::arg("unused"), ReleaseGil())
      .def("require_manual_end", &ddp::GradReducer::requireManualEnd, py::arg("is_manual"), ReleaseGil())
      .def("finish_backward", &ddp::GradReducer::finishBackward, ReleaseGil())
      .def("needs_whole_backward", &ddp::GradReducer::needsWholeBackward, ReleaseGil())
      .def("zero_grads", &ddp::GradReducer::zeroGrads, ReleaseGil())
      .def("forget_grads", &ddp::GradReducer::forgetGrads, ReleaseGil())
      .def("forget_some_grads", &ddp::GradReducer::forgetSomeGrads, py::arg("parameters"), py::arg("zeroes"),
           ReleaseGil())
      .def("scale_grads", &ddp::GradReducer::scaleGrads, py::arg("factor"), ReleaseGil())
      .def("check_grads", &ddp::GradReducer::checkGrads, ReleaseGil())
      .def("free_grads", &ddp::GradReducer::freeGrads, ReleaseGil())
      .def("restore_grads", &ddp::GradReducer::restoreGrads, ReleaseGil())
      .def("is_reduced", &ddp::GradReducer::isReduced, ReleaseGil())
      .def("overrun", &ddp::GradReducer::overrun, ReleaseGil())
      .def("record", &ddp::GradReducer::record, py::arg("timeline"), ReleaseGil())
      .def("is_in_round", &ddp::GradReducer::isInRound, ReleaseGil())
      .def("rounds", &ddp::GradReducer::rounds, ReleaseGil())
      .def("main_grads", &mainGrads)
      .def("buckets", &bucketsOf);

  py::class_<ddp::ParamGather, std::shared_ptr<ddp::ParamGather>>(module, "ParamGather")
      .def(py::init([](const ddp::GradReducer& reducer) {
             return std::make_shared<ddp::ParamGather>(reducer.groups(), reducer.buffers());
           }),
           py::arg("reducer"))
      .def("mark_stale", &ddp::ParamGather::markStale, ReleaseGil())
      .def("start", &ddp::ParamGather::start, ReleaseGil())
      .def("start_through", &ddp::ParamGather::startThrough, py::arg("bucket_group"), ReleaseGil())
      .def("finish_all", &ddp::ParamGather::finishAll, ReleaseGil())
      .def(
          "finish",
          [](ddp::ParamGather& gather, const std::vector<int>& bucketGroups) {
            if (gather.isCurrent()) return false;
            py::gil_scoped_release release;
            return gather.finish(bucketGroups);
          },
          py::arg("bucket_groups"))
      .def("record", &ddp::ParamGather::record, py::arg("timeline"), ReleaseGil())
      .def_property_readonly("is_current", &ddp::ParamGather::isCurrent)
      .def("bucket_group_of", &ddp::ParamGather::bucketGroupOf);
}

void bindGraphReads(py::module_& module) {
  py::class_<ddp::GraphReads>(module, "GraphReads")
      .def(py::init<const std::vector<at::Tensor>&, const std::vector<int>&>(), py::arg("parameters"),
           py::arg("groups"))
      .def("too_early", &ddp::GraphReads::tooEarly, py::arg("outputs"), py::arg("began"), py::arg("since"));
}

void bindExchanges(py::module_& module) {
  py::class_<ddp::StagingMemory, std::shared_ptr<ddp::StagingMemory>>(module, "StagingMemory").def(py::init<>());
  py::class_<ddp::TensorExchange>(module, "TensorExchange")
      .def(py::init<ddp::Group, std::shared_ptr<ddp::StagingMemory>, const std::vector<at::Tensor>&,
                    ddp::TensorExchange::Splits>(),
           py::arg("group"), py::arg("memory"), py::arg("sent"), py::arg("sent_splits"), ReleaseGil())
      .def("expect", &ddp::TensorExchange::expect, py::arg("received_splits"), ReleaseGil())
      .def("start", &ddp::TensorExchange::start, ReleaseGil())
      .def("wait", &ddp::TensorExchange::wait, ReleaseGil());
  py::class_<ddp::RowExchange>(module, "RowExchange")
      .def(py::init<ddp::Group, c10::Device>(), py::arg("group"), py::arg("device"))
      .def("start", &ddp::RowExchange::start, py::arg("rows"), ReleaseGil())
      .def("finish", &ddp::RowExchange::finish, ReleaseGil())
      .def(
          "exchange",
          [](ddp::RowExchange& exchange, const std::vector<int64_t>& rows) {
            exchange.start(rows);
            return exchange.finish();
          },
          py::arg("rows"), ReleaseGil())
      .def_property_readonly("has_come", &ddp::RowExchange::hasCome);
}

}  // namespace

void bindDdp(py::module_& module) {
  module.def("broadcast_tensors", &ddp::broadcastTensors, py::arg("group"), py::arg("tensors"), py::arg("rank") = 0,
             ReleaseGil());
  module.def(
      "check_agreement",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device,
         const std::vector<std::pair<std::string, std::string>>& facts, const std::string& refusal) {
        std::vector<ddp::Fact> named;
        for (const auto& [name, value] : facts) named.push_back({name, value});
        ddp::checkAgreement(*group, device, named, refusal);
      },
      py::arg("group"), py::arg("device"), py::arg("facts"), py::arg("refusal"), ReleaseGil());
  module.def(
      "abandon_group",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& why) {
        ddp::abandonGroup(*group, why);
      },
      py::arg("group"), py::arg("why"), ReleaseGil());
  module.def(
      "abandonment_of", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) { return ddp::abandonmentOf(*group); },
      py::arg("group"), ReleaseGil());
  bindGraphReads(module);
  bindExchanges(module);
  bindOptions(module);
  bindTimeline(module);
  bindTuning(module);
  bindReducer(module);
}

}  // namespace farandole::python
