#include "pipeline/passes/fuse_batches.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "pipeline/ir/action_index.h"
#include "pipeline/ir/message.h"

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
    const auto found = std::ranges::find_if(groups_, [&](const Group& group) {
      return peerRun != kNowhere && group.peer == peer && group.peerRun == peerRun;
    });
    const auto group = static_cast<std::size_t>(found - groups_.begin());
    if (found == groups_.end()) groups_.push_back({peer, peerRun});
    left_.push_back({message, peer, group});
  }

  // Group by group, as far as that leaves the messages of each edge in their order; else one by one.
  void flushTo(std::vector<Action>& actions) {
    for (std::size_t group = 0; group < groups_.size();) {
      if (!groups_[group].isDone && isNext(group)) {
        take(group, actions);
        group = 0;
      } else {
        ++group;
      }
    }
    for (Entry& entry : left_) actions.push_back(std::move(entry.message));
    left_.clear();
    groups_.clear();
  }

 private:
  struct Group {
    std::int32_t peer;
    std::int32_t peerRun;
    bool isDone = false;
  };
  struct Entry {
    Action message;
    std::int32_t peer;
    std::size_t group;
  };

  static bool isSameEdge(const Entry& one, const Entry& other) {
    return one.peer == other.peer && isSend(one.message.kind) == isSend(other.message.kind);
  }

  // Whether nothing else that is left comes before one of its messages on the same edge.
  bool isNext(std::size_t group) const {
    for (auto entry = left_.begin(); entry != left_.end(); ++entry) {
      if (entry->group != group) continue;
      const auto isBefore = [&](const Entry& other) { return other.group != group && isSameEdge(other, *entry); };
      if (std::any_of(left_.begin(), entry, isBefore)) return false;
    }
    return true;
  }

  void take(std::size_t group, std::vector<Action>& actions) {
    std::vector<Action> messages;
    for (Entry& entry : left_) {
      if (entry.group == group) messages.push_back(std::move(entry.message));
    }
    std::erase_if(left_, [group](const Entry& entry) { return entry.group == group; });
    groups_[group].isDone = true;
    if (messages.size() == 1) {
      actions.push_back(std::move(messages.front()));
    } else {
      actions.push_back(makeComposite(ActionKind::kBatchP2p, std::move(messages)));
    }
  }

  std::vector<Group> groups_;
  std::vector<Entry> left_;
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
