#include "pipeline/passes/prepost_receives.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "pipeline/ir/action_index.h"
#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/message.h"

namespace farandole::pipeline {
namespace {

// Goes through the actions of one rank, and tells before which step each receive may be posted.
class EarliestPosts {
 public:
  EarliestPosts(const Plan& plan, const ActionIndex& index, std::int32_t depth)
      : plan_(plan), index_(index), depth_(depth), lastPosts_(plan.ranks.size(), 0) {}

  std::int32_t of(const Action& action, std::int32_t step) {
    if (isCompute(action.kind)) {
      if (step == 0) floor_ = 1;
      computes_.push_back(step);
    }
    if (isSend(action.kind) && step == floor_) ++floor_;  // what it sends goes first
    if (!isReceive(action.kind)) return step;
    const std::int32_t passed = std::min(depth_, static_cast<std::int32_t>(computes_.size()));
    std::int32_t place = passed > 0 ? computes_[computes_.size() - passed] : step;
    std::int32_t& lastPost = lastPosts_[peerRank(plan_, action)];
    place = std::max({place, floor_, lastPost});
    if (action.kind == ActionKind::kRecvB) {
      const std::int32_t sent =
          index_.messageStep(ActionKind::kSendF, edgeOf(index_.graph(), action), action.microbatch);
      if (sent < step) place = std::max(place, sent + 1);
    }
    place = std::min(place, step);
    lastPost = place < step ? place : step + 1;
    return place;
  }

 private:
  const Plan& plan_;
  const ActionIndex& index_;
  const std::int32_t depth_;
  std::vector<std::int32_t> lastPosts_;  // by peer: no later receive before this step
  std::vector<std::int32_t> computes_;   // steps
  std::int32_t floor_ = 0;               // no receive is moved to before this step
};

}  // namespace

Plan prepostReceives(Plan plan, std::int32_t depth) {
  const Result<ActionIndex> index = ActionIndex::build(plan);
  if (!index) return plan;
  for (std::vector<Action>& actions : plan.ranks) {
    EarliestPosts earliest(plan, *index, depth);
    struct Place {
      std::int32_t before, step;
    };
    std::vector<Place> order;
    order.reserve(actions.size());
    for (std::int32_t step = 0; step < static_cast<std::int32_t>(actions.size()); ++step) {
      order.push_back({earliest.of(actions[step], step), step});
    }
    // What is moved to a step comes before what stands there.
    std::ranges::stable_sort(order, [](const Place& one, const Place& other) {
      if (one.before != other.before) return one.before < other.before;
      return one.before < one.step && other.before == other.step;
    });
    std::vector<Action> moved;
    moved.reserve(order.size());
    for (const Place& place : order) moved.push_back(std::move(actions[place.step]));
    actions = std::move(moved);
  }
  return plan;
}

}  // namespace farandole::pipeline
