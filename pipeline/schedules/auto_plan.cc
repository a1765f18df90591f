#include "pipeline/schedules/auto_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>

#include "pipeline/passes/lower.h"
#include "pipeline/schedules/placement.h"
#include "pipeline/schedules/registry.h"

namespace farandole::pipeline {
namespace {

std::string text(const char* format, double value) {
  char buffer[64];
  (void)std::snprintf(buffer, sizeof buffer, format, value);
  return buffer;
}

std::string describe(const PlanCandidate& candidate) {
  return candidate.name + " takes " + text("%.4g", 1e3 * candidate.makespan) + " ms and holds " +
         text("%.4g", candidate.peakMemory / 1e6) + " MB at most";
}

class Search {
 public:
  Search(const ScheduleOptions& options, const MeasuredCosts& costs,
         const std::optional<std::vector<std::int32_t>>& rankOfStage)
      : options_(options), costs_(costs), rankOfStage_(rankOfStage) {}

  Result<AutoPlan> run() {
    tryFixed();
    trySearched();
    if (candidates_.empty()) {
      return Status::invalidArgument("no schedule runs " + std::to_string(options_.numStages) + " stages on " +
                                     std::to_string(options_.numRanks) + " ranks with " +
                                     std::to_string(options_.numMicrobatches) + " microbatches, placed so");
    }
    // What is simpler was tried first, and stays first among equals.
    std::ranges::stable_sort(candidates_, {}, [](const Entry& entry) { return entry.candidate.makespan; });
    const auto chosen = std::ranges::find_if(candidates_, [](const Entry& entry) { return entry.candidate.fits; });
    if (chosen == candidates_.end()) {
      const auto least =
          std::ranges::min_element(candidates_, {}, [](const Entry& entry) { return entry.candidate.peakMemory; });
      return Status::invalidArgument("memoryLimit is " + text("%.4g", costs_.memoryLimit / 1e6) +
                                     " MB; expected as much as a plan needs: " + describe(least->candidate));
    }
    AutoPlan result;
    result.plan = chosen->plan;
    result.chosen = chosen->candidate;
    for (const Entry& entry : candidates_) result.candidates.push_back(entry.candidate);
    result.reason = reasonFor(result);
    return result;
  }

 private:
  struct Entry {
    PlanCandidate candidate;
    Plan plan;
  };

  void add(std::string name, Plan plan) {
    if (rankOfStage_ && plan.rankOfStage != *rankOfStage_) return;
    if (plan.edges != options_.edges) return;  // it runs copies of another model
    const auto run = simulateAsRun(plan);
    if (!run) return;
    const double peak = std::ranges::max(peakMemory(plan, costs_.memory));
    candidates_.push_back({{std::move(name), run->makespan, peak, peak <= costs_.memoryLimit}, std::move(plan)});
  }

  // With the receives where the executor has them, which makes a difference where messages take time.
  Result<SimulationResult> simulateAsRun(const Plan& plan) const {
    if (costs_.times.transfer.areZero()) return simulate(plan, costs_.times);
    const Result<Plan> lowered = lower(plan, ChannelModel::kTagged);
    return lowered ? simulate(*lowered, costs_.times) : lowered.status();
  }

  void tryFixed() {
    for (const std::string_view name : scheduleNames()) {
      if (auto plan = makePlan(name, options_)) add(std::string(name), std::move(*plan));
    }
    ScheduleOptions deep = options_;
    deep.warmupPerStage = 2;
    if (auto plan = makePlan("1F1B", deep)) add("1F1B with twice the warm-up", std::move(*plan));
  }

  void trySearched() {
    std::vector<std::vector<std::int32_t>> placements;
    if (rankOfStage_) {
      placements.push_back(*rankOfStage_);
    } else {
      placements.push_back(makeLoopPlan(options_).rankOfStage);
      if (checkTwoStagesPerRank("", options_)) placements.push_back(makeVPlan(options_).rankOfStage);
    }
    for (const auto& placement : placements) {
      for (const bool splits : {false, true}) {
        for (const bool latestFirst : {false, true}) {
          auto plan = listSchedule(options_, placement, costs_, {splits, latestFirst});
          if (!plan) continue;
          std::string name = splits ? "list scheduling of F, I and W" : "list scheduling of F and B";
          name += latestFirst ? ", the latest stage first" : ", the oldest microbatch first";
          if (&placement != &placements.front()) name += ", stages in a V";
          add(std::move(name), std::move(*plan));
        }
      }
    }
  }

  std::string reasonFor(const AutoPlan& result) const {
    const auto fitting = std::ranges::count_if(result.candidates, &PlanCandidate::fits);
    std::string reason = describe(result.chosen) + ": the fastest of " + std::to_string(fitting) + " plans";
    if (costs_.memoryLimit < std::numeric_limits<double>::infinity()) {
      reason += " that hold " + text("%.4g", costs_.memoryLimit / 1e6) + " MB or less";
    }
    if (!costs_.times.transfer.areZero()) {
      const std::string messages = describeTransfers(costs_.times.transfer, result.plan);
      reason += messages.empty() ? ", without messages between ranks" : " where messages take " + messages;
    }
    for (const PlanCandidate& other : result.candidates) {
      if (!other.fits && other.makespan < result.chosen.makespan) return reason + "; " + describe(other);
    }
    return reason;
  }

  const ScheduleOptions options_;
  const MeasuredCosts& costs_;
  const std::optional<std::vector<std::int32_t>>& rankOfStage_;
  std::vector<Entry> candidates_;
};

Status checkAmounts(const char* name, std::size_t stage, std::initializer_list<double> amounts) {
  for (const double amount : amounts) {
    if (std::isfinite(amount) && amount >= 0) continue;
    return Status::invalidArgument(std::string(name) + " of stage " + std::to_string(stage) + " has " +
                                   text("%g", amount) + "; expected finite numbers, at least 0");
  }
  return Status::ok();
}

}  // namespace

Result<AutoPlan> makeAutoPlan(const ScheduleOptions& options, const MeasuredCosts& costs,
                              const std::optional<std::vector<std::int32_t>>& rankOfStage) {
  FARANDOLE_RETURN_IF_ERROR(checkCounts("auto", options));
  FARANDOLE_RETURN_IF_ERROR(checkTransfers(costs.times.transfer));
  const auto numStages = static_cast<std::size_t>(options.numStages);
  const auto check = [&](const char* name, std::size_t size) {
    return size == numStages
               ? Status::ok()
               : Status::invalidArgument(std::string(name) + " has " + std::to_string(size) +
                                         " entries; expected one for each stage, " + std::to_string(numStages));
  };
  FARANDOLE_RETURN_IF_ERROR(check("costs.times.stages", costs.times.stages.size()));
  FARANDOLE_RETURN_IF_ERROR(check("costs.memory", costs.memory.size()));
  for (std::size_t stage = 0; stage < numStages; ++stage) {
    const StageCost& cost = costs.times.stages[stage];
    FARANDOLE_RETURN_IF_ERROR(checkAmounts("costs.times.stages", stage,
                                           {cost.forward, cost.backward, cost.backwardInput, cost.backwardWeight}));
    const StageMemory& memory = costs.memory[stage];
    FARANDOLE_RETURN_IF_ERROR(checkAmounts("costs.memory", stage, {memory.activations, memory.forWeights}));
  }
  if (rankOfStage) {
    FARANDOLE_RETURN_IF_ERROR(check("rankOfStage", rankOfStage->size()));
    for (const std::int32_t rank : *rankOfStage) {
      if (rank < 0 || rank >= options.numRanks) {
        return Status::invalidArgument("rankOfStage has " + std::to_string(rank) + "; expected ranks from 0 to " +
                                       std::to_string(options.numRanks - 1));
      }
    }
  }
  return Search(options, costs, rankOfStage).run();
}

}  // namespace farandole::pipeline
