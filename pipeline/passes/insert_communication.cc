#include "pipeline/passes/insert_communication.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "pipeline/ir/action_index.h"
#include "pipeline/ir/message.h"
#include "pipeline/ir/structure.h"

namespace farandole::pipeline {
namespace {

using Actions = std::vector<Action>;

// Every step of the compute plan has two gaps: what is posted before it and after it.
struct Gaps {
  std::vector<Actions> receivesBefore;  // [step]
  std::vector<Actions> sendsAfter;      // [step]
};

class Inserter {
 public:
  Inserter(const Plan& plan, const ActionIndex& index) : plan_(plan), index_(index), gaps_(plan.ranks.size()) {
    for (std::int32_t rank = 0; rank < plan.numRanks(); ++rank) {
      gaps_[rank].receivesBefore.resize(plan.ranks[rank].size());
      gaps_[rank].sendsAfter.resize(plan.ranks[rank].size());
    }
  }

  Plan run() {
    placeSends();
    placeReceives();
    Plan result = plan_;
    for (std::int32_t rank = 0; rank < plan_.numRanks(); ++rank) result.ranks[rank] = merge(rank);
    return result;
  }

 private:
  void placeSends() {
    for (std::int32_t rank = 0; rank < plan_.numRanks(); ++rank) {
      for (std::size_t step = 0; step < plan_.ranks[rank].size(); ++step) {
        for (const Action& leaf : leaves(plan_.ranks[rank][step])) {
          for (const std::int32_t number : outputEdges(index_.graph(), leaf.kind, leaf.stage)) {
            const StageEdge& edge = index_.graph().edge(number);
            if (!crossesRanks(plan_, edge)) continue;
            const Action send = makeMessage(sendFor(leaf.kind), edge, leaf.microbatch);
            gaps_[rank].sendsAfter[step].push_back(send);
            edges_[{rank, peerRank(plan_, send)}].push_back(send);
          }
        }
      }
    }
  }

  // From the last message of an edge to the first: each is received before what
  // consumes it, and no later than the message after it.
  void placeReceives() {
    for (const auto& [ranks, sends] : edges_) {
      auto latest = static_cast<std::int32_t>(plan_.ranks[ranks.second].size());
      for (auto send = sends.rbegin(); send != sends.rend(); ++send) {
        const Action receive = counterpart(*send);
        latest = std::min(latest, consumerStep(receive));
        gaps_[ranks.second].receivesBefore[latest].push_back(receive);
      }
    }
    for (Gaps& gaps : gaps_) {
      for (Actions& receives : gaps.receivesBefore) std::reverse(receives.begin(), receives.end());
    }
  }

  std::int32_t consumerStep(const Action& receive) const {
    if (receive.kind == ActionKind::kRecvF) {
      return index_.step(ActionKind::kForward, receive.stage, receive.microbatch);
    }
    return index_.inputBackwardStep(receive.stage, receive.microbatch);
  }

  Actions merge(std::int32_t rank) const {
    const Actions& steps = plan_.ranks[rank];
    Actions merged;
    for (std::size_t step = 0; step < steps.size(); ++step) {
      Actions receives = gaps_[rank].receivesBefore[step];
      if (step > 0) {
        const Actions& sends = gaps_[rank].sendsAfter[step - 1];
        const Actions first = takeExchanged(rank, sends, receives);
        merged.insert(merged.end(), first.begin(), first.end());
        merged.insert(merged.end(), sends.begin(), sends.end());
      }
      merged.insert(merged.end(), receives.begin(), receives.end());
      merged.push_back(steps[step]);
    }
    if (!steps.empty()) {
      const Actions& sends = gaps_[rank].sendsAfter.back();
      merged.insert(merged.end(), sends.begin(), sends.end());
    }
    return merged;
  }

  // The lower rank's message goes first: of `receives`, takes those that are exchanged for one of `sends` with a lower
  // rank, and what the same rank has sent before them.
  Actions takeExchanged(std::int32_t rank, const Actions& sends, Actions& receives) const {
    Actions taken;
    Actions left;
    for (auto receive = receives.rbegin(); receive != receives.rend(); ++receive) {
      const std::int32_t peer = peerRank(plan_, *receive);
      const bool isBefore =
          std::any_of(taken.begin(), taken.end(), [&](const Action& later) { return peerRank(plan_, later) == peer; });
      const bool isTaken = isBefore || (peer < rank && exchanges(sends, *receive));
      (isTaken ? taken : left).push_back(*receive);
    }
    receives.assign(left.rbegin(), left.rend());
    std::reverse(taken.begin(), taken.end());
    return taken;
  }

  // Whether one of `sends` is received by the rank that sends to `receive`
  // between the same two steps as it sends.
  bool exchanges(const Actions& sends, const Action& receive) const {
    const std::int32_t peer = peerRank(plan_, receive);
    const std::int32_t gap = producerStep(counterpart(receive)) + 1;
    if (gap >= static_cast<std::int32_t>(plan_.ranks[peer].size())) return false;
    const Actions& peerReceives = gaps_[peer].receivesBefore[gap];
    return std::any_of(sends.begin(), sends.end(), [&](const Action& send) {
      return std::find(peerReceives.begin(), peerReceives.end(), counterpart(send)) != peerReceives.end();
    });
  }

  std::int32_t producerStep(const Action& send) const {
    if (send.kind == ActionKind::kSendF) return index_.step(ActionKind::kForward, send.stage, send.microbatch);
    return index_.inputBackwardStep(send.stage, send.microbatch);
  }

  const Plan& plan_;
  const ActionIndex& index_;
  std::vector<Gaps> gaps_;                                          // [rank]
  std::map<std::pair<std::int32_t, std::int32_t>, Actions> edges_;  // sends in order, by sending and receiving rank
};

}  // namespace

Result<Plan> insertCommunication(const Plan& plan) {
  const Result<ActionIndex> index = ActionIndex::build(plan);
  if (!index) return index.status();
  FARANDOLE_RETURN_IF_ERROR(checkStructure(plan, *index, Lowering::kCompute));
  return Inserter(plan, *index).run();
}

}  // namespace farandole::pipeline
