#include "pipeline/ir/csv.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <span>

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

std::string_view trimmed(std::string_view cell) {
  const std::size_t begin = cell.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return cell.substr(begin, cell.find_last_not_of(" \t") + 1 - begin);
}

struct Cell {
  std::string_view text;
  std::size_t column;
};

// Those that are not blank.
std::vector<Cell> cellsOf(std::string_view line) {
  std::vector<Cell> cells;
  std::size_t begin = 0;
  while (true) {
    const std::size_t comma = std::min(line.find(',', begin), line.size());
    const std::string_view cell = trimmed(unquoted(line.substr(begin, comma - begin)));
    if (!cell.empty()) cells.push_back({cell, begin + 1});
    if (comma == line.size()) return cells;
    begin = comma + 1;
  }
}

Result<std::vector<Action>> parseActions(const std::vector<Cell>& cells, std::size_t line) {
  std::vector<Action> actions;
  for (const Cell& cell : cells) {
    Result<Action> action = parseAction(cell.text);
    if (!action) return action.status().wrap(at(line, cell.column));
    actions.push_back(std::move(*action));
  }
  return actions;
}

constexpr std::string_view kEdges = "edges";
constexpr std::string_view kMicrobatches = "microbatches";

// The cells of such a line but the first, each two numbers with a sign between them.
template <typename Pair>
Result<std::vector<Pair>> parsePairs(const std::vector<Cell>& cells, char sign, std::size_t line) {
  std::vector<Pair> pairs;
  for (const Cell& cell : std::span(cells).subspan(1)) {
    const char* const end = cell.text.data() + cell.text.size();
    std::int32_t first = 0;
    std::int32_t second = 0;
    const auto begins = std::from_chars(cell.text.data(), end, first);
    const bool isPair = begins.ec == std::errc{} && begins.ptr != end && *begins.ptr == sign;
    const auto ends = isPair ? std::from_chars(begins.ptr + 1, end, second) : begins;
    if (!isPair || ends.ec != std::errc{} || ends.ptr != end) {
      return Status::invalidArgument(at(line, cell.column) + ": '" + std::string(cell.text) + "' among " +
                                     std::string(cells.front().text) + "; expected two numbers like '0" + sign + "4'");
    }
    pairs.push_back({first, second});
  }
  return pairs;
}

// Whether the line is one of the two of the graph of stages, which it then sets.
Result<bool> takeGraph(const std::vector<Cell>& cells, std::size_t line, Plan& plan) {
  const std::string_view name = cells.empty() ? std::string_view() : cells.front().text;
  if (name != kEdges && name != kMicrobatches) return false;
  if (name == kEdges ? plan.edges.has_value() : !plan.microbatchesOfStage.empty()) {
    return Status::invalidArgument("line " + std::to_string(line) + ": " + std::string(name) +
                                   " a second time; expected them once");
  }
  if (name == kEdges) {
    Result<std::vector<StageEdge>> edges = parsePairs<StageEdge>(cells, '>', line);
    if (!edges) return edges.status();
    plan.edges = std::move(*edges);
  } else {
    Result<std::vector<MicrobatchRange>> ranges = parsePairs<MicrobatchRange>(cells, ':', line);
    if (!ranges) return ranges.status();
    plan.microbatchesOfStage = std::move(*ranges);
  }
  return true;
}

Result<Plan> parseLines(std::string_view text) {
  Plan plan;
  bool hasGraph = false;
  std::size_t line = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view content = text.substr(begin, end - begin);
    if (content.ends_with('\r')) content.remove_suffix(1);
    begin = end + 1;
    const std::vector<Cell> cells = cellsOf(content);
    const Result<bool> isGraph = takeGraph(cells, ++line, plan);
    if (!isGraph) return isGraph.status();
    hasGraph = hasGraph || *isGraph;
    if (*isGraph || (hasGraph && cells.empty())) continue;
    if (hasGraph) {
      return Status::invalidArgument("line " + std::to_string(line) +
                                     ": actions behind the graph of stages; expected the lines of the ranks first");
    }
    Result<std::vector<Action>> actions = parseActions(cells, line);
    if (!actions) return actions.status();
    plan.ranks.push_back(std::move(*actions));
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
  if (plan.edges) {
    text += kEdges;
    for (const auto& [from, to] : *plan.edges) text += ',' + std::to_string(from) + '>' + std::to_string(to);
    text += '\n';
  }
  if (!plan.microbatchesOfStage.empty()) {
    text += kMicrobatches;
    for (const auto& [begin, end] : plan.microbatchesOfStage) {
      text += ',' + std::to_string(begin) + ':' + std::to_string(end);
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
