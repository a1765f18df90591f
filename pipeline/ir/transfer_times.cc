#include "pipeline/ir/transfer_times.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "pipeline/ir/message.h"

namespace farandole::pipeline {
namespace {

std::pair<std::int32_t, std::int32_t> ends(const EdgeTransfer& one) { return {one.edge.from, one.edge.to}; }

Status checkOne(const std::string& name, double seconds) {
  if (std::isfinite(seconds) && seconds >= 0) return Status::ok();
  return Status::invalidArgument(name + " is " + std::to_string(seconds) +
                                 " seconds; expected a finite number, at least 0");
}

std::string milliseconds(double seconds) {
  char buffer[64];
  (void)std::snprintf(buffer, sizeof buffer, "%.3g", 1e3 * seconds);
  return buffer;
}

}  // namespace

double TransferTimes::of(const StageEdge& edge, bool isGradient) const {
  const auto found = std::ranges::lower_bound(edges, std::pair(edge.from, edge.to), {}, ends);
  if (found == edges.end() || found->edge != edge) return other;
  return isGradient ? found->gradient : found->activation;
}

bool TransferTimes::areZero() const {
  return other == 0 &&
         std::ranges::all_of(edges, [](const EdgeTransfer& one) { return one.activation == 0 && one.gradient == 0; });
}

Status checkTransfers(const TransferTimes& times) {
  FARANDOLE_RETURN_IF_ERROR(checkOne("transfer", times.other));
  for (std::size_t i = 0; i < times.edges.size(); ++i) {
    const EdgeTransfer& one = times.edges[i];
    const std::string name =
        "transfer over edge " + std::to_string(one.edge.from) + " -> " + std::to_string(one.edge.to);
    FARANDOLE_RETURN_IF_ERROR(checkOne(name, one.activation));
    FARANDOLE_RETURN_IF_ERROR(checkOne(name, one.gradient));
    if (i > 0 && ends(times.edges[i - 1]) >= ends(one)) {
      return Status::invalidArgument(name + " is not in its place; expected edges ascending, each once");
    }
  }
  return Status::ok();
}

std::string describeTransfers(const TransferTimes& times, const Plan& plan) {
  const Result<StageGraph> graph = StageGraph::make(plan);
  if (!graph) return {};
  std::vector<double> seconds;
  for (std::int32_t i = 0; i < graph->numEdges(); ++i) {
    if (!crossesRanks(plan, graph->edge(i))) continue;
    for (const bool isGradient : {false, true}) seconds.push_back(times.of(graph->edge(i), isGradient));
  }
  if (seconds.empty()) return {};
  const auto [least, most] = std::ranges::minmax(seconds);
  const std::string longest = milliseconds(most) + " ms";
  return milliseconds(least) == milliseconds(most) ? longest : milliseconds(least) + " to " + longest;
}

}  // namespace farandole::pipeline
