#include "pipeline/ir/csv.h"

#include <algorithm>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/text.h"

namespace farandole::pipeline {
namespace {

constexpr std::int32_t kUnplaced = -1;

std::string at(std::size_t line, std::size_t column) {
  return "line " + std::to_string(line) + ", column " + std::to_string(column);
}

// Python's csv module quotes a line's only cell when it is empty; no action needs quotes.
std::string_view unquoted(std::string_view cell) {
  if (cell.size() >= 2 && cell.front() == '"' && cell.back() == '"') return cell.substr(1, cell.size() - 2);
  return cell;
}

bool isBlank(std::string_view cell) { return cell.find_first_not_of(" \t") == std::string_view::npos; }

Result<std::vector<Action>> parseLine(std::string_view text, std::size_t line) {
  std::vector<Action> actions;
  std::size_t begin = 0;
  while (true) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    const std::string_view cell = unquoted(text.substr(begin, comma - begin));
    if (!isBlank(cell)) {
      Result<Action> action = parseAction(cell);
      if (!action) return action.status().wrap(at(line, begin + 1));
      actions.push_back(std::move(*action));
    }
    if (comma == text.size()) return actions;
    begin = comma + 1;
  }
}

Result<Plan> parseLines(std::string_view text) {
  Plan plan;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, end - begin);
    if (line.ends_with('\r')) line.remove_suffix(1);
    Result<std::vector<Action>> actions = parseLine(line, plan.ranks.size() + 1);
    if (!actions) return actions.status();
    plan.ranks.push_back(std::move(*actions));
    begin = end + 1;
  }
  for (const std::vector<Action>& actions : plan.ranks) {
    for (const Action& action : actions) {
      for (const Action& leaf : leaves(action)) {
        plan.numMicrobatches = std::max(plan.numMicrobatches, leaf.microbatch + 1);
      }
    }
  }
  return plan;
}

// A stage belongs to the rank that computes it.
Status placeStages(Plan& plan) {
  std::size_t numActions = 0;
  for (const std::vector<Action>& actions : plan.ranks) {
    for (const Action& action : actions) numActions += leaves(action).size();
  }
  for (std::int32_t rank = 0; rank < plan.numRanks(); ++rank) {
    for (const Action& action : plan.ranks[rank]) {
      if (!isCompute(action.kind)) continue;
      for (const Action& leaf : leaves(action)) {
        const auto stage = static_cast<std::size_t>(leaf.stage);
        if (stage >= numActions) {
          return Status::invalidArgument(toString(leaf) + " on line " + std::to_string(rank + 1) + ": stage " +
                                         std::to_string(stage) + " of a plan of only " + std::to_string(numActions) +
                                         " actions; expected every stage to have at least one");
        }
        if (stage >= plan.rankOfStage.size()) plan.rankOfStage.resize(stage + 1, kUnplaced);
        std::int32_t& owner = plan.rankOfStage[stage];
        if (owner != kUnplaced && owner != rank) {
          return Status::invalidArgument("stage " + std::to_string(stage) + " is computed on line " +
                                         std::to_string(owner + 1) + " and on line " + std::to_string(rank + 1) + " (" +
                                         toString(leaf) + "); expected one rank per stage");
        }
        owner = rank;
      }
    }
  }
  const auto missing = std::find(plan.rankOfStage.begin(), plan.rankOfStage.end(), kUnplaced);
  if (missing != plan.rankOfStage.end()) {
    return Status::invalidArgument("stage " + std::to_string(missing - plan.rankOfStage.begin()) +
                                   " is computed on no line, but a later stage is; expected stages 0 to n - 1");
  }
  return Status::ok();
}

}  // namespace

std::string toCsv(const Plan& plan) {
  std::string text;
  for (const std::vector<Action>& actions : plan.ranks) {
    for (std::size_t step = 0; step < actions.size(); ++step) {
      if (step > 0) text += ',';
      text += toString(actions[step]);
    }
    text += '\n';
  }
  return text;
}

Result<Plan> fromCsv(std::string_view text, std::vector<std::int32_t> rankOfStage) {
  Result<Plan> plan = parseLines(text);
  if (!plan) return plan;
  plan->numStages = static_cast<std::int32_t>(rankOfStage.size());
  plan->rankOfStage = std::move(rankOfStage);
  return plan;
}

Result<Plan> fromCsv(std::string_view text) {
  Result<Plan> plan = parseLines(text);
  if (!plan) return plan;
  FARANDOLE_RETURN_IF_ERROR(placeStages(*plan));
  plan->numStages = static_cast<std::int32_t>(plan->rankOfStage.size());
  return plan;
}

}  // namespace farandole::pipeline
