#include "pipeline/ir/message_order.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/ir/action_check.h"
#include "pipeline/ir/message.h"
#include "pipeline/ir/text.h"

namespace farandole::pipeline {
namespace {

struct Edge {
  std::vector<const Action*> sends;
  std::vector<const Action*> receives;
};

using Edges = std::map<std::pair<std::int32_t, std::int32_t>, Edge>;  // by sending and receiving rank

Edges collectEdges(const Plan& plan) {
  Edges edges;
  for (std::int32_t rank = 0; rank < plan.numRanks(); ++rank) {
    for (const Action& action : plan.ranks[rank]) {
      for (const Action& leaf : leaves(action)) {
        if (isSend(leaf.kind)) edges[{rank, peerRank(plan, leaf)}].sends.push_back(&leaf);
        if (isReceive(leaf.kind)) edges[{peerRank(plan, leaf), rank}].receives.push_back(&leaf);
      }
    }
  }
  return edges;
}

}  // namespace

Status checkMessageOrder(const Plan& plan, const ActionIndex& index) {
  for (const auto& [ranks, edge] : collectEdges(plan)) {
    for (std::size_t i = 0; i < edge.sends.size(); ++i) {
      if (counterpart(*edge.sends[i]) == *edge.receives[i]) continue;
      return Status::invalidArgument(
          "message " + std::to_string(i) + " from rank " + std::to_string(ranks.first) + " to rank " +
          std::to_string(ranks.second) + ": " + toString(*edge.sends[i]) + " is sent at " +
          describeStep(plan, ranks.first, index.step(*edge.sends[i])) + ", but " + toString(*edge.receives[i]) +
          " is received at " + describeStep(plan, ranks.second, index.step(*edge.receives[i])) +
          "; expected receives in the order of their sends, for the channel matches them in turn");
    }
  }
  return Status::ok();
}

}  // namespace farandole::pipeline
