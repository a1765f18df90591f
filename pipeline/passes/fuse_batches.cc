#include "pipeline/passes/fuse_batches.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "pipeline/ir/action_index.h"
#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/chain.h"

namespace farandole::pipeline {
namespace {

constexpr std::int32_t kNowhere = -1;

// For every step of every rank the number of the run of posts that it is in.
std::vector<std::vector<std::int32_t>> numberRuns(const Plan& plan) {
  std::vector<std::vector<std::int32_t>> runs;
  for (const std::vector<Action>& actions : plan.ranks) {
    std::vector<std::int32_t> run;
    run.reserve(actions.size());
    std::int32_t number = 0;
    for (const Action& action : actions) run.push_back(isPost(action.kind) ? number : number++);
    runs.push_back(std::move(run));
  }
  return runs;
}

// One run of one rank: its messages by peer and by the peer's run that has their other ends.
class Run {
 public:
  void add(std::int32_t peer, std::int32_t peerRun, const Action& message) {
    for (Group& group : groups_) {
      if (peerRun == kNowhere || group.peer != peer || group.peerRun != peerRun) continue;
      group.messages.push_back(message);
      return;
    }
    groups_.push_back({peer, peerRun, {message}});
  }

  void flushTo(std::vector<Action>& actions) {
    for (Group& group : groups_) {
      if (group.messages.size() == 1) {
        actions.push_back(std::move(group.messages.front()));
      } else {
        actions.push_back(makeComposite(ActionKind::kBatchP2p, std::move(group.messages)));
      }
    }
    groups_.clear();
  }

 private:
  struct Group {
    std::int32_t peer;
    std::int32_t peerRun;
    std::vector<Action> messages;
  };
  std::vector<Group> groups_;
};

}  // namespace

Plan fuseBatches(Plan plan) {
  const Result<ActionIndex> index = ActionIndex::build(plan);
  if (!index) return plan;
  const std::vector<std::vector<std::int32_t>> runs = numberRuns(plan);
  for (std::vector<Action>& actions : plan.ranks) {
    std::vector<Action> fused;
    Run run;
    for (Action& action : actions) {
      if (!isPost(action.kind)) {
        run.flushTo(fused);
        fused.push_back(std::move(action));
        continue;
      }
      for (const Action& message : leaves(action)) {
        const std::int32_t peer = peerRank(plan, message);
        const std::int32_t step = index->step(counterpart(message));
        run.add(peer, step == ActionIndex::kAbsent ? kNowhere : runs[peer][step], message);
      }
    }
    run.flushTo(fused);
    actions = std::move(fused);
  }
  return plan;
}

}  // namespace farandole::pipeline
