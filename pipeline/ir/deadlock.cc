#include "pipeline/ir/deadlock.h"

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "pipeline/ir/action_check.h"
#include "pipeline/ir/message.h"
#include "pipeline/ir/text.h"

namespace farandole::pipeline {
namespace {

constexpr std::size_t kMaxLines = 12;
constexpr std::size_t kMaxGridRanks = 8;
constexpr std::int32_t kStepsBefore = 2;
constexpr std::int32_t kStepsAfter = 4;
constexpr std::size_t kMaxCell = 40;

struct Place {
  std::int32_t rank;
  std::int32_t step;
  bool operator==(const Place&) const = default;
};

struct Wait {
  Place place;
  std::string reason;
};

class CycleFinder {
 public:
  CycleFinder(const Plan& plan, const ActionIndex& index, const Progress& progress)
      : plan_(plan), index_(index), progress_(progress) {}

  // Follows one wait after another until a place comes back.
  std::vector<Wait> find() const {
    std::vector<Wait> walk;
    Place place = start();
    while (true) {
      const auto seen = std::find_if(walk.begin(), walk.end(), [&](const Wait& wait) { return wait.place == place; });
      if (seen != walk.end()) return {seen, walk.end()};
      Wait wait{place, {}};
      const Place next = follow(place, wait.reason);
      walk.push_back(std::move(wait));
      place = next;
    }
  }

 private:
  std::string name(Place place) const { return describeStep(plan_, place.rank, place.step); }
  std::int32_t numSteps(std::int32_t rank) const { return static_cast<std::int32_t>(plan_.ranks[rank].size()); }

  // Some rank stopped, else there were no deadlock.
  Place start() const {
    std::int32_t rank = 0;
    while (progress_.stoppedAt(rank) == numSteps(rank)) ++rank;
    return {rank, progress_.stoppedAt(rank)};
  }

  Place follow(Place place, std::string& reason) const {
    const Action& action = plan_.ranks[place.rank][place.step];
    if (!isPost(action.kind)) {
      const Place awaited{place.rank, progress_.awaitedPost(place.rank)};
      reason = "waits for step " + std::to_string(awaited.step) + " (" +
               toString(plan_.ranks[awaited.rank][awaited.step]) + ")";
      return awaited;
    }
    if (!progress_.isStarted(place.rank, place.step)) {
      const Place head{place.rank, progress_.queueHead(place.rank)};
      reason = "is queued behind step " + std::to_string(head.step) + " (" +
               toString(plan_.ranks[head.rank][head.step]) + ")";
      return head;
    }
    const Action& stuck = *std::find_if(leaves(action).begin(), leaves(action).end(),
                                        [&](const Action& leaf) { return !progress_.isTransferred(leaf); });
    const Place other{peerRank(plan_, stuck), index_.step(counterpart(stuck))};
    reason = "needs " + toString(counterpart(stuck)) + " of " + name(other);
    if (other.step < progress_.stoppedAt(other.rank)) return other;
    reason += ", which that rank has not reached";
    return {other.rank, progress_.stoppedAt(other.rank)};
  }

  const Plan& plan_;
  const ActionIndex& index_;
  const Progress& progress_;
};

std::string cellText(const Plan& plan, std::int32_t rank, std::int32_t step, bool stuck) {
  std::string text = std::to_string(step) + ":" + toString(plan.ranks[rank][step]);
  if (text.size() > kMaxCell) text = text.substr(0, kMaxCell - 3) + "...";
  return stuck ? "[" + text + "]" : " " + text + " ";
}

// One row per rank of the cycle, each around its own stuck steps.
std::string drawGrid(const Plan& plan, const std::vector<Wait>& cycle) {
  std::map<std::int32_t, std::vector<std::int32_t>> stuckSteps;
  for (const Wait& wait : cycle) {
    if (stuckSteps.size() == kMaxGridRanks && !stuckSteps.contains(wait.place.rank)) continue;
    stuckSteps[wait.place.rank].push_back(wait.place.step);
  }
  std::vector<std::vector<std::string>> rows;
  std::vector<std::size_t> widths(kStepsBefore + 1 + kStepsAfter, 0);
  for (const auto& [rank, steps] : stuckSteps) {
    const std::int32_t first = std::max(0, *std::min_element(steps.begin(), steps.end()) - kStepsBefore);
    std::vector<std::string> row;
    for (std::size_t column = 0; column < widths.size(); ++column) {
      const std::int32_t step = first + static_cast<std::int32_t>(column);
      if (step >= static_cast<std::int32_t>(plan.ranks[rank].size())) break;
      row.push_back(cellText(plan, rank, step, std::find(steps.begin(), steps.end(), step) != steps.end()));
      widths[column] = std::max(widths[column], row.back().size());
    }
    rows.push_back(std::move(row));
  }
  std::string text;
  const std::size_t labelWidth = std::to_string(stuckSteps.rbegin()->first).size();
  for (auto rank = stuckSteps.begin(); const std::vector<std::string>& row : rows) {
    const std::string label = std::to_string((rank++)->first);
    std::string line = "\n  rank " + std::string(labelWidth - label.size(), ' ') + label + " |";
    for (std::size_t column = 0; column < row.size(); ++column) {
      line += row[column] + std::string(widths[column] - row[column].size(), ' ');
    }
    line.resize(line.find_last_not_of(' ') + 1);
    text += line;
  }
  return text;
}

}  // namespace

std::string describeDeadlock(const Plan& plan, const ActionIndex& index, const Progress& progress) {
  const std::vector<Wait> cycle = CycleFinder(plan, index, progress).find();
  std::string text;
  for (std::size_t i = 0; i < std::min(cycle.size(), kMaxLines); ++i) {
    text += "\n  " + describeStep(plan, cycle[i].place.rank, cycle[i].place.step) + " " + cycle[i].reason;
  }
  if (cycle.size() > kMaxLines) text += "\n  ... and " + std::to_string(cycle.size() - kMaxLines) + " more";
  return text + "\nand so back to " + describeStep(plan, cycle.front().place.rank, cycle.front().place.step) +
         ". Steps around it, stuck ones in brackets:" + drawGrid(plan, cycle);
}

}  // namespace farandole::pipeline
