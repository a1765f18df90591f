#include "bindings/csrc/pipeline_timeline.h"

#include "bindings/csrc/planning_errors.h"
#include "pipeline/ir/measured_step.h"
#include "pipeline/ir/memory_curve.h"
#include "pipeline/ir/text.h"
#include "pipeline/ir/timed_messages.h"

namespace py = pybind11;

namespace farandole::python {

namespace {

using TimedText = std::tuple<std::string, double, double>;

pipeline::SimulationResult measuredStep(const std::vector<std::vector<TimedText>>& ranks) {
  std::vector<std::vector<pipeline::TimedAction>> timed;
  for (const std::vector<TimedText>& rank : ranks) {
    auto& actions = timed.emplace_back();
    for (const auto& [text, start, end] : rank) actions.push_back({valueOf(pipeline::parseAction(text)), start, end});
  }
  return valueOf(pipeline::measuredStep(std::move(timed)));
}

// (receive, sender, receiver, sent, arrived)
using MessageTuple = std::tuple<std::string, std::int32_t, std::int32_t, double, double>;

std::vector<MessageTuple> timedMessages(const pipeline::SimulationResult& step) {
  std::vector<MessageTuple> messages;
  for (const pipeline::TimedMessage& message : pipeline::timedMessages(step)) {
    messages.emplace_back(pipeline::toString(message.receive), message.sender, message.receiver, message.sent,
                          message.arrived);
  }
  return messages;
}

// For each rank its points and its peak.
using CurveTuple = std::tuple<std::vector<std::pair<double, double>>, double>;

std::vector<CurveTuple> memoryOverTime(const pipeline::SimulationResult& step,
                                       const std::vector<std::array<double, 2>>& memory) {
  std::vector<pipeline::StageMemory> stages;
  for (const auto& [activations, forWeights] : memory) stages.push_back({activations, forWeights});
  std::vector<CurveTuple> curves;
  for (const pipeline::MemoryCurve& curve : valueOf(pipeline::memoryOverTime(step, stages))) {
    auto& [points, peak] = curves.emplace_back();
    for (const auto& [time, bytes] : curve.points) points.emplace_back(time, bytes);
    peak = curve.peak;
  }
  return curves;
}

}  // namespace

void bindPipelineTimeline(py::module_& module) {
  module.def("measured_step", &measuredStep, py::arg("ranks"));
  module.def("timed_messages", &timedMessages, py::arg("step"));
  module.def("memory_over_time", &memoryOverTime, py::arg("step"), py::arg("memory"));
}

}  // namespace farandole::python
