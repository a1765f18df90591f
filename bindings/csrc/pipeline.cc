#include <algorithm>
#include <map>

#include "bindings/csrc/layers.h"
#include "bindings/csrc/pipeline_executor.h"
#include "bindings/csrc/pipeline_timeline.h"
#include "bindings/csrc/planning_errors.h"
#include "pipeline/ir/csv.h"
#include "pipeline/ir/draw.h"
#include "pipeline/ir/message.h"
#include "pipeline/ir/simulate.h"
#include "pipeline/ir/text.h"
#include "pipeline/ir/validate.h"
#include "pipeline/passes/lower.h"
#include "pipeline/schedules/auto_plan.h"
#include "pipeline/schedules/registry.h"
#include "pipeline/schedules/schedule.h"

namespace py = pybind11;

namespace farandole::python {

namespace {

using pipeline::Plan;
using pipeline::SimulationResult;

// None: the chain, or all microbatches.
using PairList = std::optional<std::vector<std::pair<std::int32_t, std::int32_t>>>;

std::optional<std::vector<pipeline::StageEdge>> edgesOf(const PairList& tuples) {
  if (!tuples) return std::nullopt;
  std::vector<pipeline::StageEdge> edges;
  for (const auto& [from, to] : *tuples) edges.push_back({from, to});
  return edges;
}

PairList edgePairs(const Plan& plan) {
  if (!plan.edges) return std::nullopt;
  PairList pairs(std::in_place);
  for (const auto& [from, to] : *plan.edges) pairs->push_back({from, to});
  return pairs;
}

PairList microbatchPairs(const Plan& plan) {
  if (plan.microbatchesOfStage.empty()) return std::nullopt;
  PairList pairs(std::in_place);
  for (const auto& [begin, end] : plan.microbatchesOfStage) pairs->push_back({begin, end});
  return pairs;
}

PairList sorted(PairList pairs) {
  if (pairs) std::ranges::sort(*pairs);
  return pairs;
}

// What is given beside a text that may say it, too.
void checkSame(const char* name, const PairList& given, const PairList& read) {
  if (!given || !read) return;
  if (*given == *read) return;
  throw py::value_error(std::string(name) + " is " + std::string(py::repr(py::cast(*given))) +
                        ", expected None or those that the text names, " + std::string(py::repr(py::cast(*read))));
}

// What the texts of a plan do not say, or do not have to.
void setGraph(Plan& plan, const PairList& edges, const PairList& microbatchesOfStage) {
  checkSame("edges", sorted(edges), sorted(edgePairs(plan)));
  if (edges) plan.edges = edgesOf(edges);
  if (!microbatchesOfStage) return;
  checkSame("microbatches_of_stage", microbatchesOfStage, microbatchPairs(plan));
  plan.microbatchesOfStage.clear();
  for (const auto& [begin, end] : *microbatchesOfStage) plan.microbatchesOfStage.push_back({begin, end});
}

Plan planFromActions(const std::vector<std::vector<std::string>>& ranks, std::vector<std::int32_t> rankOfStage,
                     int numMicrobatches, const PairList& edges, const PairList& microbatchesOfStage) {
  Plan plan;
  plan.numStages = static_cast<std::int32_t>(rankOfStage.size());
  plan.numMicrobatches = numMicrobatches;
  plan.rankOfStage = std::move(rankOfStage);
  setGraph(plan, edges, microbatchesOfStage);
  for (const auto& texts : ranks) {
    auto& actions = plan.ranks.emplace_back();
    for (const std::string& text : texts) actions.push_back(valueOf(pipeline::parseAction(text)));
  }
  return plan;
}

std::vector<std::vector<std::string>> actionsOf(const Plan& plan) {
  std::vector<std::vector<std::string>> ranks;
  for (const auto& actions : plan.ranks) {
    auto& texts = ranks.emplace_back();
    for (const pipeline::Action& action : actions) texts.push_back(pipeline::toString(action));
  }
  return ranks;
}

// (seconds of a message, [(from, to, seconds with an output, seconds with a gradient)] over edges where it is another).
using TransferTuple = std::pair<double, std::vector<std::tuple<std::int32_t, std::int32_t, double, double>>>;

pipeline::TransferTimes transfersOf(const TransferTuple& given) {
  std::vector<pipeline::EdgeTransfer> edges;
  for (const auto& [from, to, activation, gradient] : given.second) edges.push_back({{from, to}, activation, gradient});
  return {given.first, std::move(edges)};
}

// Durations by the action's text: of every compute action of the plan.
SimulationResult simulateMeasured(const Plan& plan, const std::map<std::string, double>& seconds,
                                  const TransferTuple& transfer) {
  const auto cost = [&](std::int32_t, const pipeline::Action& action) {
    const std::string text = pipeline::toString(action);
    const auto found = seconds.find(text);
    if (found == seconds.end()) throw py::value_error("seconds has no entry for action " + text + " of the plan");
    return found->second;
  };
  return valueOf(pipeline::simulate(plan, cost, transfersOf(transfer)));
}

// One (F, B, I, W) per stage.
pipeline::SimulationCosts costsOf(const std::vector<std::array<double, 4>>& stages, const TransferTuple& transfer) {
  pipeline::SimulationCosts costs;
  for (const auto& [f, b, i, w] : stages) costs.stages.push_back({f, b, i, w});
  costs.transfer = transfersOf(transfer);
  return costs;
}

SimulationResult simulateStages(const Plan& plan, const std::vector<std::array<double, 4>>& stages,
                                const TransferTuple& transfer) {
  return valueOf(pipeline::simulate(plan, costsOf(stages, transfer)));
}

using CandidateTuple = std::tuple<std::string, double, double, bool>;

CandidateTuple tupleOf(const pipeline::PlanCandidate& candidate) {
  return {candidate.name, candidate.makespan, candidate.peakMemory, candidate.fits};
}

// The plan, what was chosen, all that was looked at, and why.
std::tuple<Plan, CandidateTuple, std::vector<CandidateTuple>, std::string> autoPlan(
    int numRanks, int numStages, int numMicrobatches, bool forwardOnly,
    const std::vector<std::array<double, 4>>& seconds, const TransferTuple& transfer,
    const std::vector<std::array<double, 2>>& memory, double memoryLimit,
    const std::optional<std::vector<std::int32_t>>& rankOfStage, const PairList& edges) {
  pipeline::ScheduleOptions options{numRanks, numStages, numMicrobatches, forwardOnly};
  options.edges = edgesOf(edges);
  pipeline::MeasuredCosts costs;
  costs.times = costsOf(seconds, transfer);
  for (const auto& [activations, forWeights] : memory) costs.memory.push_back({activations, forWeights});
  costs.memoryLimit = memoryLimit;
  pipeline::AutoPlan made = valueOf(pipeline::makeAutoPlan(options, costs, rankOfStage));
  std::vector<CandidateTuple> candidates;
  for (const pipeline::PlanCandidate& candidate : made.candidates) candidates.push_back(tupleOf(candidate));
  return {std::move(made.plan), tupleOf(made.chosen), std::move(candidates), std::move(made.reason)};
}

py::list timelineOf(const pipeline::RankTimeline& rank) {
  py::list actions;
  for (const pipeline::TimedAction& timed : rank.actions) {
    actions.append(py::make_tuple(pipeline::toString(timed.action), timed.start, timed.end));
  }
  return actions;
}

void bindPlan(py::module_& module) {
  py::class_<Plan>(module, "Plan", "The actions of every rank in one training step.")
      .def_readonly("num_stages", &Plan::numStages)
      .def_readonly("num_microbatches", &Plan::numMicrobatches)
      .def_readonly("rank_of_stage", &Plan::rankOfStage)
      .def_property_readonly("num_ranks", &Plan::numRanks)
      .def_property_readonly("actions", &actionsOf, "For each rank the texts of its actions.")
      .def_property_readonly("edges", &edgePairs,
                             "(from, to) of the graph of stages; None: each stage to the next one.")
      .def_property_readonly("microbatches_of_stage", &microbatchPairs,
                             "(begin, end) for each stage; None: all of them.")
      .def_static("from_actions", &planFromActions, py::arg("actions"), py::arg("rank_of_stage"),
                  py::arg("num_microbatches"), py::arg("edges") = py::none(),
                  py::arg("microbatches_of_stage") = py::none())
      .def_property_readonly("has_communication", &pipeline::hasCommunication)
      .def(
          "forwards", [](const Plan& plan) { return pipeline::forwardsOf(plan); }, "The plan's forwards alone.")
      .def("to_csv", [](const Plan& plan) { return pipeline::toCsv(plan); })
      .def_static(
          "from_csv",
          [](const std::string& text, std::optional<std::vector<std::int32_t>> rankOfStage, const PairList& edges,
             const PairList& microbatchesOfStage) {
            Plan plan =
                valueOf(rankOfStage ? pipeline::fromCsv(text, std::move(*rankOfStage)) : pipeline::fromCsv(text));
            setGraph(plan, edges, microbatchesOfStage);
            return plan;
          },
          py::arg("text"), py::arg("rank_of_stage") = py::none(), py::arg("edges") = py::none(),
          py::arg("microbatches_of_stage") = py::none())
      .def(
          "lower",
          [](const Plan& plan, pipeline::ChannelModel channel) { return valueOf(pipeline::lower(plan, channel)); },
          py::arg("channel") = pipeline::ChannelModel::kTagged)
      .def("__eq__", [](const Plan& a, const Plan& b) { return a == b; });
}

void bindSimulation(py::module_& module) {
  py::class_<pipeline::RankTimeline>(module, "RankTimeline")
      .def_readonly("busy", &pipeline::RankTimeline::busy)
      .def_readonly("bubble", &pipeline::RankTimeline::bubble)
      .def_readonly("peak_live_activations", &pipeline::RankTimeline::peakLiveActivations)
      .def_property_readonly("actions", &timelineOf, "[(action, start, end)] in seconds.");
  py::class_<SimulationResult>(module, "SimulationResult")
      .def_readonly("makespan", &SimulationResult::makespan)
      .def_property_readonly("bubble", &SimulationResult::bubble)
      .def_readonly("ranks", &SimulationResult::ranks)
      .def("draw", &pipeline::drawTimeline, py::arg("columns") = 100);
  module.def("simulate_plan", &simulateMeasured, py::arg("plan"), py::arg("seconds"), py::arg("transfer"));
  module.def("simulate_plan", &simulateStages, py::arg("plan"), py::arg("seconds"), py::arg("transfer"));
}

}  // namespace

void bindPipeline(py::module_& module) {
  py::enum_<pipeline::ChannelModel>(module, "ChannelModel")
      .value("TAGGED", pipeline::ChannelModel::kTagged)
      .value("FIFO_PER_EDGE", pipeline::ChannelModel::kFifoPerEdge)
      .value("ONE_QUEUE_PER_RANK", pipeline::ChannelModel::kOneQueuePerRank);
  bindPlan(module);
  bindSimulation(module);
  module.def("schedule_names", &pipeline::scheduleNames);
  module.def(
      "make_plan",
      [](const std::string& name, int numRanks, int numStages, int numMicrobatches, bool forwardOnly,
         int warmupPerStage, int microbatchGroup, const PairList& edges) {
        return valueOf(pipeline::makePlan(name, {numRanks, numStages, numMicrobatches, forwardOnly, warmupPerStage,
                                                 microbatchGroup, edgesOf(edges)}));
      },
      py::arg("name"), py::arg("num_ranks"), py::arg("num_stages"), py::arg("num_microbatches"),
      py::arg("forward_only"), py::arg("warmup_per_stage") = 1, py::arg("microbatch_group") = 0,
      py::arg("edges") = py::none());
  module.def("auto_plan", &autoPlan, py::arg("num_ranks"), py::arg("num_stages"), py::arg("num_microbatches"),
             py::arg("forward_only"), py::arg("seconds"), py::arg("transfer"), py::arg("memory"),
             py::arg("memory_limit"), py::arg("rank_of_stage"), py::arg("edges") = py::none());
  module.def(
      "validate_plan",
      [](const Plan& plan, pipeline::ChannelModel channel) {
        const Status status = pipeline::validate(plan, channel);
        if (!status.isOk()) throw py::value_error(status.toString());
      },
      py::arg("plan"), py::arg("channel"));
  bindPipelineTimeline(module);
  bindPipelineExecutor(module);
}

}  // namespace farandole::python
