#include "pipeline/ir/timed_messages.h"

#include <algorithm>
#include <map>
#include <string>

#include "pipeline/ir/action_kind.h"
#include "pipeline/ir/message.h"
#include "pipeline/ir/text.h"

namespace farandole::pipeline {
namespace {

struct Posted {
  std::int32_t rank;
  double time;
};

// By their texts.
std::map<std::string, Posted> postedReceives(const SimulationResult& step) {
  std::map<std::string, Posted> receives;
  for (std::int32_t rank = 0; rank < static_cast<std::int32_t>(step.ranks.size()); ++rank) {
    for (const TimedAction& timed : step.ranks[rank].actions) {
      for (const Action& leaf : leaves(timed.action)) {
        if (isReceive(leaf.kind)) receives[toString(leaf)] = {rank, timed.end};
      }
    }
  }
  return receives;
}

}  // namespace

std::vector<TimedMessage> timedMessages(const SimulationResult& step) {
  std::vector<TimedMessage> messages;
  if (!step.transfer) return messages;
  const std::map<std::string, Posted> receives = postedReceives(step);
  for (std::int32_t rank = 0; rank < static_cast<std::int32_t>(step.ranks.size()); ++rank) {
    for (const TimedAction& timed : step.ranks[rank].actions) {
      for (const Action& leaf : leaves(timed.action)) {
        if (!isSend(leaf.kind)) continue;
        const Action receive = counterpart(leaf);
        const auto found = receives.find(toString(receive));
        if (found == receives.end()) continue;
        const auto [receiver, posted] = found->second;
        const StageEdge edge = isWhereEdgeBegins(leaf.kind) ? StageEdge{leaf.stage, otherStage(leaf)}
                                                            : StageEdge{otherStage(leaf), leaf.stage};
        const double underWay = step.transfer->of(edge, isGradient(leaf.kind));
        messages.push_back({receive, rank, receiver, timed.end, std::max(timed.end, posted) + underWay});
      }
    }
  }
  return messages;
}

}  // namespace farandole::pipeline
