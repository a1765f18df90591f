#include "pipeline/ir/simulate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "pipeline/ir/action_check.h"
#include "pipeline/ir/action_index.h"
#include "pipeline/ir/message.h"
#include "pipeline/ir/structure.h"
#include "pipeline/ir/text.h"

namespace farandole::pipeline {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
constexpr std::size_t kMaxStuckNamed = 8;

class Simulation {
 public:
  Simulation(const Plan& plan, const ActionIndex& index, const ActionCost& cost, const TransferTimes& transfer,
             bool lowered)
      : plan_(plan),
        index_(index),
        graph_(index.graph()),
        cost_(cost),
        transfer_(transfer),
        lowered_(lowered),
        ranks_(plan.ranks.size()) {
    sent_.assign(numMessages(plan, graph_), kUnknown);
    // Without receives in the plan they count as posted from the beginning.
    received_.assign(numMessages(plan, graph_), lowered ? kUnknown : 0.0);
    for (const bool isGradient : {false, true}) {
      for (std::int32_t edge = 0; edge < graph_.numEdges(); ++edge) {
        underWay_.push_back(transfer.of(graph_.edge(edge), isGradient));
      }
    }
  }

  Result<SimulationResult> run() {
    for (std::int32_t rank = plan_.numRanks() - 1; rank >= 0; --rank) runnable_.push_back(rank);
    while (!runnable_.empty()) {
      const std::int32_t rank = runnable_.back();
      runnable_.pop_back();
      FARANDOLE_RETURN_IF_ERROR(advance(rank));
    }
    FARANDOLE_RETURN_IF_ERROR(checkAllEnded());
    return finish();
  }

 private:
  struct RankState {
    RankTimeline timeline;
    double clock = 0;
    std::int32_t live = 0;
    bool waiting = false;
  };

  std::size_t number(ActionKind kind, std::int32_t edge, std::int32_t microbatch) const {
    return messageNumber(plan_, graph_, kind, edge, microbatch);
  }

  // NaN while one end is not posted.
  double arrival(std::size_t message) const {
    const double sent = sent_[message];
    const double received = received_[message];
    return std::isnan(sent) || std::isnan(received)
               ? kUnknown
               : std::max(sent, received) + underWay_[message / plan_.numMicrobatches];
  }

  // When all that `leaf` waits for is there; NaN when that is not known yet.
  double ready(const Action& leaf, std::int32_t step) const {
    double time = 0;
    for (const std::int32_t edge : inputEdges(graph_, leaf.kind, leaf.stage)) {
      if (!crossesRanks(plan_, graph_.edge(edge))) continue;
      const double there = arrival(number(receiveFor(leaf.kind), edge, leaf.microbatch));
      if (std::isnan(there)) return there;
      time = std::max(time, there);
    }
    if (!isWaitSend(leaf.kind)) return time;
    for (ActionKind kind : {ActionKind::kSendF, ActionKind::kSendB}) {
      if (!waitsFor(leaf.kind, kind)) continue;
      for (const std::int32_t edge : messageEdges(graph_, kind, leaf.stage)) {
        const std::int32_t posted = index_.messageStep(kind, edge, leaf.microbatch);
        if (posted == ActionIndex::kAbsent || posted > step) continue;
        const double done = arrival(number(kind, edge, leaf.microbatch));
        if (std::isnan(done)) return done;
        time = std::max(time, done);
      }
    }
    return time;
  }

  void wake(std::int32_t rank) {
    if (!ranks_[rank].waiting) return;
    ranks_[rank].waiting = false;
    runnable_.push_back(rank);
  }

  void post(ActionKind kind, std::int32_t edge, std::int32_t microbatch, double time) {
    const StageEdge& ends = graph_.edge(edge);
    (isSend(kind) ? sent_ : received_)[number(kind, edge, microbatch)] = time;
    wake(plan_.rankOfStage[isWhereEdgeBegins(kind) ? ends.to : ends.from]);
  }

  Status advance(std::int32_t rank) {
    RankState& state = ranks_[rank];
    const std::vector<Action>& actions = plan_.ranks[rank];
    for (auto step = static_cast<std::int32_t>(state.timeline.actions.size());
         step < static_cast<std::int32_t>(actions.size()); ++step) {
      const Action& action = actions[step];
      double start = state.clock;
      for (const Action& leaf : leaves(action)) {
        const double time = ready(leaf, step);
        if (std::isnan(time)) {
          state.waiting = true;
          return Status::ok();
        }
        if (isCompute(action.kind)) start = std::max(start, time);
        if (isWaitSend(leaf.kind)) state.clock = std::max(state.clock, time);
      }
      if (isCompute(action.kind)) {
        FARANDOLE_RETURN_IF_ERROR(compute(action, rank, step, start));
      }
      for (const Action& leaf : leaves(action)) {
        if (isMessage(leaf.kind)) post(leaf.kind, edgeOf(graph_, leaf), leaf.microbatch, state.clock);
      }
      state.timeline.actions.push_back({action, start, state.clock});
    }
    return Status::ok();
  }

  Status compute(const Action& action, std::int32_t rank, std::int32_t step, double start) {
    RankState& state = ranks_[rank];
    const double duration = cost_(rank, action);
    if (!std::isfinite(duration) || duration < 0) {
      return Status::invalidArgument(describeStep(plan_, rank, step) + ": the cost is " + std::to_string(duration) +
                                     " seconds; expected a finite number, at least 0");
    }
    state.clock = start + duration;
    state.timeline.busy += duration;
    if (index_.hasBackward()) {
      for (const Action& leaf : leaves(action)) state.live += isForward(leaf.kind) ? 1 : 0;
      state.timeline.peakLiveActivations = std::max(state.timeline.peakLiveActivations, state.live);
      for (const Action& leaf : leaves(action)) state.live -= isWeightBackward(leaf.kind) ? 1 : 0;
    }
    if (lowered_) return Status::ok();
    for (const Action& leaf : leaves(action)) {
      for (const std::int32_t edge : outputEdges(graph_, leaf.kind, leaf.stage)) {
        if (crossesRanks(plan_, graph_.edge(edge))) post(sendFor(leaf.kind), edge, leaf.microbatch, state.clock);
      }
    }
    return Status::ok();
  }

  Status checkAllEnded() const {
    std::string stuck;
    std::size_t numStuck = 0;
    for (std::int32_t rank = 0; rank < plan_.numRanks(); ++rank) {
      const std::size_t step = ranks_[rank].timeline.actions.size();
      if (step == plan_.ranks[rank].size()) continue;
      if (numStuck++ >= kMaxStuckNamed) continue;
      stuck += "\n  " + describeStep(plan_, rank, static_cast<std::int32_t>(step));
    }
    if (numStuck == 0) return Status::ok();
    return Status::invalidArgument("deadlock: " + std::to_string(numStuck) + " ranks wait for each other and stop at" +
                                   stuck);
  }

  SimulationResult finish() {
    SimulationResult result;
    result.transfer = transfer_;
    for (RankState& state : ranks_) {
      result.makespan = std::max(result.makespan, state.clock);
      result.ranks.push_back(std::move(state.timeline));
    }
    for (RankTimeline& timeline : result.ranks) {
      timeline.bubble = result.makespan > 0 ? 1 - timeline.busy / result.makespan : 0;
    }
    return result;
  }

  const Plan& plan_;
  const ActionIndex& index_;
  const StageGraph& graph_;
  const ActionCost& cost_;
  const TransferTimes& transfer_;
  bool lowered_;
  std::vector<RankState> ranks_;
  std::vector<double> underWay_;  // [edge], then of gradients: seconds
  std::vector<double> sent_;      // [number of a message], seconds
  std::vector<double> received_;  // the same for the receives
  std::vector<std::int32_t> runnable_;
};

double costOf(const StageCost& cost, ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward: return cost.forward;
    case ActionKind::kBackward: return cost.backward;
    case ActionKind::kBackwardInput: return cost.backwardInput;
    default: return cost.backwardWeight;
  }
}

}  // namespace

double SimulationResult::bubble() const {
  double sum = 0;
  for (const RankTimeline& timeline : ranks) sum += timeline.bubble;
  return ranks.empty() ? 0 : sum / static_cast<double>(ranks.size());
}

Result<SimulationResult> simulate(const Plan& plan, const ActionCost& cost, const TransferTimes& transfer) {
  FARANDOLE_RETURN_IF_ERROR(checkTransfers(transfer));
  const Result<ActionIndex> index = ActionIndex::build(plan);
  if (!index) return index.status();
  const bool lowered = hasCommunication(plan);
  FARANDOLE_RETURN_IF_ERROR(checkStructure(plan, *index, lowered ? Lowering::kMessages : Lowering::kCompute));
  return Simulation(plan, *index, cost, transfer, lowered).run();
}

Result<SimulationResult> simulate(const Plan& plan, const SimulationCosts& costs) {
  if (costs.stages.size() != static_cast<std::size_t>(plan.numStages)) {
    return Status::invalidArgument("costs.stages has " + std::to_string(costs.stages.size()) +
                                   " entries; expected one per stage, " + std::to_string(plan.numStages));
  }
  const ActionCost cost = [&](std::int32_t, const Action& action) {
    double sum = 0;
    for (const Action& leaf : leaves(action)) sum += costOf(costs.stages[leaf.stage], leaf.kind);
    return sum;
  };
  return simulate(plan, cost, costs.transfer);
}

}  // namespace farandole::pipeline
