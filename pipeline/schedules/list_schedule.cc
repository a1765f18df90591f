#include "pipeline/schedules/list_schedule.h"

#include <algorithm>
#include <queue>
#include <utility>

namespace farandole::pipeline {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

class ListScheduler {
 public:
  ListScheduler(const ScheduleOptions& options, const std::vector<std::int32_t>& rankOfStage,
                const MeasuredCosts& costs, const Preference& preference)
      : options_(options),
        costs_(costs),
        preference_(preference),
        stages_(options.numStages),
        ranks_(options.numRanks) {
    plan_.numStages = options.numStages;
    plan_.numMicrobatches = options.numMicrobatches;
    plan_.rankOfStage = rankOfStage;
    plan_.ranks.resize(options.numRanks);
    for (std::int32_t stage = 0; stage < options.numStages; ++stage) {
      stages_[stage].inputs.assign(options.numMicrobatches, stage == 0 ? 0 : kNever);
      stages_[stage].gradients.assign(options.numMicrobatches, kNever);
      ranks_[rankOfStage[stage]].stages.push_back(stage);
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
  struct Stage {
    std::vector<double> inputs;     // when each microbatch's is there
    std::vector<double> gradients;  // of its output
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
    return own.numBackwards < own.numForwards ? own.gradients[own.numBackwards] : kNever;
  }
  double forwardTime(std::int32_t stage) const {
    const Stage& own = stages_[stage];
    return own.numForwards < options_.numMicrobatches && hasRoom(stage) ? own.inputs[own.numForwards] : kNever;
  }

  // Room is left for one microbatch in the rank's later stages: without it the first of them could not go on.
  bool hasRoom(std::int32_t stage) const {
    if (options_.forwardOnly) return true;
    const Rank& rank = ranks_[plan_.rankOfStage[stage]];
    double needed = rank.held;
    for (const std::int32_t other : rank.stages) needed += other >= stage ? costs_.memory[other].activations : 0;
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

  // When what ends on the stage's rank then is on the neighbour's.
  double arrival(std::int32_t stage, std::int32_t neighbour, double end) {
    const std::int32_t there = plan_.rankOfStage[neighbour];
    const double time = end + (there == plan_.rankOfStage[stage] ? 0 : costs_.times.transfer);
    look(time, there);
    return time;
  }

  void doForward(std::int32_t stage) {
    Stage& own = stages_[stage];
    const std::int32_t microbatch = own.numForwards++;
    if (!options_.forwardOnly) ranks_[plan_.rankOfStage[stage]].held += costs_.memory[stage].activations;
    const double end = put(stage, ActionKind::kForward, microbatch, costs_.times.stages[stage].forward);
    if (stage + 1 < options_.numStages) {
      stages_[stage + 1].inputs[microbatch] = arrival(stage, stage + 1, end);
    } else if (!options_.forwardOnly) {
      own.gradients[microbatch] = end;
    }
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
    if (stage > 0) stages_[stage - 1].gradients[microbatch] = arrival(stage, stage - 1, end);
  }

  void doWeight(std::int32_t stage) {
    ranks_[plan_.rankOfStage[stage]].held -= costs_.memory[stage].forWeights;
    (void)put(stage, ActionKind::kBackwardWeight, stages_[stage].numWeights++,
              costs_.times.stages[stage].backwardWeight);
  }

  const ScheduleOptions options_;
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
  return ListScheduler(options, rankOfStage, costs, preference).run();
}

}  // namespace farandole::pipeline
