#include "pipeline/passes/prepost_receives.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "pipeline/ir/action_kind.h"

namespace farandole::pipeline {

Plan prepostReceives(Plan plan, std::int32_t depth) {
  for (std::vector<Action>& actions : plan.ranks) {
    std::vector<std::size_t> computes;                       // steps
    std::vector<std::pair<std::size_t, std::size_t>> order;  // new place, old step
    for (std::size_t step = 0; step < actions.size(); ++step) {
      if (isCompute(actions[step].kind)) computes.push_back(step);
      std::size_t place = step;
      if (isReceive(actions[step].kind) && depth > 0) {
        const auto passed = std::min(static_cast<std::size_t>(depth), computes.size());
        if (passed > 0) place = computes[computes.size() - passed];
      }
      order.push_back({place, step});
    }
    // A receive and the compute action that it is posted before have the same place.
    std::stable_sort(order.begin(), order.end(), [&](const auto& a, const auto& b) {
      if (a.first != b.first) return a.first < b.first;
      return isReceive(actions[a.second].kind) && !isReceive(actions[b.second].kind);
    });
    std::vector<Action> moved;
    moved.reserve(order.size());
    for (const auto& [place, step] : order) moved.push_back(std::move(actions[step]));
    actions = std::move(moved);
  }
  return plan;
}

}  // namespace farandole::pipeline
