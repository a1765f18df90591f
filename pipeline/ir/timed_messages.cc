#include "pipeline/ir/timed_messages.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/chain.h"

namespace farandole::pipeline {
namespace {

struct Posted {
  std::int32_t rank;
  double time;
};

using Key = std::tuple<ActionKind, std::int32_t, std::int32_t>;

Key keyOf(const Action& message) { return {message.kind, message.stage, message.microbatch}; }

std::map<Key, Posted> postedReceives(const SimulationResult& step) {
  std::map<Key, Posted> receives;
  for (std::int32_t rank = 0; rank < static_cast<std::int32_t>(step.ranks.size()); ++rank) {
    for (const TimedAction& timed : step.ranks[rank].actions) {
      for (const Action& leaf : leaves(timed.action)) {
        if (isReceive(leaf.kind)) receives[keyOf(leaf)] = {rank, timed.end};
      }
    }
  }
  return receives;
}

}  // namespace

std::vector<TimedMessage> timedMessages(const SimulationResult& step) {
  std::vector<TimedMessage> messages;
  if (!step.transfer) return messages;
  const std::map<Key, Posted> receives = postedReceives(step);
  for (std::int32_t rank = 0; rank < static_cast<std::int32_t>(step.ranks.size()); ++rank) {
    for (const TimedAction& timed : step.ranks[rank].actions) {
      for (const Action& leaf : leaves(timed.action)) {
        if (!isSend(leaf.kind)) continue;
        const Action receive = counterpart(leaf);
        const auto found = receives.find(keyOf(receive));
        if (found == receives.end()) continue;
        const auto [receiver, posted] = found->second;
        messages.push_back({receive, rank, receiver, timed.end, std::max(timed.end, posted) + *step.transfer});
      }
    }
  }
  return messages;
}

}  // namespace farandole::pipeline
