#include "pipeline/schedules/list_schedule.h"

#include <algorithm>
#include <queue>
#include <utility>

#include "pipeline/ir/stage_graph.h"

namespace farandole::pipeline {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

class ListScheduler {
 public:
  ListScheduler(const ScheduleOptions& options, Plan plan, StageGraph graph, const MeasuredCosts& costs,
                const Preference& preference)
      : options_(options),
        graph_(std::move(graph)),
        costs_(costs),
        preference_(preference),
        stages_(options.numStages),
        ranks_(options.numRanks),
        plan_(std::move(plan)) {
    for (std::int32_t stage = 0; stage < options.numStages; ++stage) {
      // Where nothing comes after a stage, its gradient is there with its output.
      const std::size_t numGradients = std::max<std::size_t>(1, graph_.outOf(stage).size());
      stages_[stage].inputs.assign(options.numMicrobatches, {graph_.into(stage).size()});
      stages_[stage].gradients.assign(options.numMicrobatches, {numGradients});
      ranks_[plan_.rankOfStage[stage]].stages.push_back(stage);
    }
  }

  std::optional<Plan> run() {
    for (std::int32_t rank = 0; rank < options_.numRanks; ++rank) look(0, rank);
    while (!looks_.empty()) {
      const auto [time, rank] = looks_.top();
      looks_.pop();
      if (time >= ranks_[rank].clock) advance(rank, time);
    }
    const bool isDone = std::ranges::all_of(stages_, [&](const Stage& stage) {
      return stage.numForwards == options_.numMicrobatches &&
             (options_.forwardOnly || stage.numWeights == options_.numMicrobatches);
    });
    return isDone ? std::optional(std::move(plan_)) : std::nullopt;
  }

 private:
  // What a stage needs for a microbatch, and when the last of it is there.
  struct Awaited {
    std::size_t numMissing = 0;
    double last = 0;

    double time() const { return numMissing == 0 ? last : kNever; }
    void add(double arrival) {
      --numMissing;
      last = std::max(last, arrival);
    }
  };
  struct Stage {
    std::vector<Awaited> inputs;     // [microbatch]
    std::vector<Awaited> gradients;  // of its output
    std::int32_t numForwards = 0;
    std::int32_t numBackwards = 0;
    std::int32_t numWeights = 0;
  };
  struct Rank {
    std::vector<std::int32_t> stages;
    double clock = 0;
    double held = 0;
  };
  using Look = std::pair<double, std::int32_t>;  // when, and which rank

  void look(double time, std::int32_t rank) {
    if (time < kNever) looks_.push({time, rank});
  }

  // When the stage's next backward could begin, or its next forward.
  double backwardTime(std::int32_t stage) const {
    const Stage& own = stages_[stage];
    return own.numBackwards < own.numForwards ? own.gradients[own.numBackwards].time() : kNever;
  }
  double forwardTime(std::int32_t stage) const {
    const Stage& own = stages_[stage];
    if (own.numForwards == options_.numMicrobatches || !hasRoom(stage)) return kNever;
    return own.inputs[own.numForwards].time();
  }

  // Room is left for the microbatch in those of the rank's stages that it has yet to come to: without it the oldest one
  // could not go on.
  bool hasRoom(std::int32_t stage) const {
    if (options_.forwardOnly) return true;
    const Rank& rank = ranks_[plan_.rankOfStage[stage]];
    double needed = rank.held;
    for (const std::int32_t other : rank.stages) {
      const bool isToCome = stages_[other].numForwards <= stages_[stage].numForwards;
      needed += isToCome ? costs_.memory[other].activations : 0;
    }
    return needed <= costs_.memoryLimit;
  }

  void advance(std::int32_t r, double now) {
    Rank& rank = ranks_[r];
    rank.clock = now;
    std::optional<std::int32_t> backward;
    std::optional<std::int32_t> forward;
    std::optional<std::int32_t> weight;
    double next = kNever;  // what is on its way
    for (const std::int32_t stage : rank.stages) {
      const double gradient = backwardTime(stage);
      const double input = forwardTime(stage);
      // The gradient that came first; W the oldest of the stage nearest to the loss.
      if (gradient <= now && (!backward || gradient < backwardTime(*backward))) backward = stage;
      if (input <= now && (!forward || isPreferred(stage, *forward))) forward = stage;
      if (stages_[stage].numWeights < stages_[stage].numBackwards) weight = stage;
      for (const double time : {gradient, input}) next = time > now ? std::min(next, time) : next;
    }
    if (backward) return doBackward(*backward);
    if (forward) return doForward(*forward);
    if (weight) return doWeight(*weight);
    look(next, r);
  }

  bool isPreferred(std::int32_t stage, std::int32_t other) const {
    if (preference_.latestStageFirst) return stage > other;
    return stages_[stage].numForwards < stages_[other].numForwards;
  }

  // Puts the action, and says when it ends.
  double put(std::int32_t stage, ActionKind kind, std::int32_t microbatch, double duration) {
    const std::int32_t r = plan_.rankOfStage[stage];
    plan_.ranks[r].push_back({stage, kind, microbatch, {}});
    ranks_[r].clock += duration;
    look(ranks_[r].clock, r);
    return ranks_[r].clock;
  }

  // When what ends then at one end of the edge, a gradient or else an output, is at the other one.
  double arrival(const StageEdge& edge, bool isGradient, double end) {
    const std::int32_t there = plan_.rankOfStage[isGradient ? edge.from : edge.to];
    const bool isLocal = plan_.rankOfStage[edge.from] == plan_.rankOfStage[edge.to];
    const double time = end + (isLocal ? 0 : costs_.times.transfer.of(edge, isGradient));
    look(time, there);
    return time;
  }

  void doForward(std::int32_t stage) {
    Stage& own = stages_[stage];
    const std::int32_t microbatch = own.numForwards++;
    if (!options_.forwardOnly) ranks_[plan_.rankOfStage[stage]].held += costs_.memory[stage].activations;
    const double end = put(stage, ActionKind::kForward, microbatch, costs_.times.stages[stage].forward);
    for (const std::int32_t number : graph_.outOf(stage)) {
      const StageEdge& edge = graph_.edge(number);
      stages_[edge.to].inputs[microbatch].add(arrival(edge, /*isGradient=*/false, end));
    }
    if (!options_.forwardOnly && graph_.outOf(stage).empty()) own.gradients[microbatch].add(end);
  }

  void doBackward(std::int32_t stage) {
    Stage& own = stages_[stage];
    const StageMemory& memory = costs_.memory[stage];
    const StageCost& cost = costs_.times.stages[stage];
    const std::int32_t microbatch = own.numBackwards++;
    const bool isSplit = preference_.splitsBackward;
    ranks_[plan_.rankOfStage[stage]].held -= memory.activations - (isSplit ? memory.forWeights : 0);
    if (!isSplit) ++own.numWeights;
    const double end = put(stage, isSplit ? ActionKind::kBackwardInput : ActionKind::kBackward, microbatch,
                           isSplit ? cost.backwardInput : cost.backward);
    for (const std::int32_t number : graph_.into(stage)) {
      const StageEdge& edge = graph_.edge(number);
      stages_[edge.from].gradients[microbatch].add(arrival(edge, /*isGradient=*/true, end));
    }
  }

  void doWeight(std::int32_t stage) {
    ranks_[plan_.rankOfStage[stage]].held -= costs_.memory[stage].forWeights;
    (void)put(stage, ActionKind::kBackwardWeight, stages_[stage].numWeights++,
              costs_.times.stages[stage].backwardWeight);
  }

  const ScheduleOptions options_;
  const StageGraph graph_;
  const MeasuredCosts& costs_;
  const Preference preference_;
  std::vector<Stage> stages_;
  std::vector<Rank> ranks_;
  Plan plan_;
  std::priority_queue<Look, std::vector<Look>, std::greater<>> looks_;
};

}  // namespace

std::optional<Plan> listSchedule(const ScheduleOptions& options, const std::vector<std::int32_t>& rankOfStage,
                                 const MeasuredCosts& costs, const Preference& preference) {
  Plan plan;
  plan.numStages = options.numStages;
  plan.numMicrobatches = options.numMicrobatches;
  plan.edges = options.edges;
  Result<StageGraph> graph = StageGraph::make(plan);
  if (!graph) return std::nullopt;
  plan.rankOfStage = rankOfStage;
  plan.ranks.resize(options.numRanks);
  return ListScheduler(options, std::move(plan), std::move(*graph), costs, preference).run();
}

}  // namespace farandole::pipeline
