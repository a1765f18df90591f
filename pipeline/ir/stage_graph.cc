#include "pipeline/ir/stage_graph.h"

#include <algorithm>
#include <string>
#include <utility>

namespace farandole::pipeline {
namespace {

std::vector<StageEdge> chain(std::int32_t numStages) {
  std::vector<StageEdge> edges;
  for (std::int32_t stage = 0; stage + 1 < numStages; ++stage) edges.push_back({stage, stage + 1});
  return edges;
}

std::string name(const StageEdge& edge) { return std::to_string(edge.from) + " -> " + std::to_string(edge.to); }

std::string name(const MicrobatchRange& range) {
  return "microbatches " + std::to_string(range.begin) + " to " + std::to_string(range.end - 1);
}

Status checkEdge(const Plan& plan, const StageEdge& edge) {
  const auto isStage = [&](std::int32_t stage) { return stage >= 0 && stage < plan.numStages; };
  if (!isStage(edge.from) || !isStage(edge.to) || edge.from == edge.to) {
    return Status::invalidArgument("edge " + name(edge) + ": expected two different stages of 0 to " +
                                   std::to_string(plan.numStages - 1));
  }
  const MicrobatchRange before = plan.microbatchesOf(edge.from);
  const MicrobatchRange after = plan.microbatchesOf(edge.to);
  if (before == after) return Status::ok();
  return Status::invalidArgument("edge " + name(edge) + ": it comes from " + name(before) + " and leads to " +
                                 name(after) + "; expected stages that are joined to run the same ones");
}

// Takes away stages that nothing leads to, until none is left.
Status checkAcyclic(const StageGraph& graph, std::int32_t numStages) {
  std::vector<std::size_t> numInputs;
  std::vector<std::int32_t> free;
  for (std::int32_t stage = 0; stage < numStages; ++stage) {
    numInputs.push_back(graph.into(stage).size());
    if (numInputs.back() == 0) free.push_back(stage);
  }
  for (std::int32_t left = numStages; left > 0; --left) {
    if (free.empty()) {
      const auto stuck = std::ranges::find_if(numInputs, [](std::size_t count) { return count > 0; });
      return Status::invalidArgument("edges form a cycle before or at stage " +
                                     std::to_string(stuck - numInputs.begin()) + "; expected none");
    }
    const std::int32_t stage = free.back();
    free.pop_back();
    for (const std::int32_t edge : graph.outOf(stage)) {
      const std::int32_t next = graph.edge(edge).to;
      if (--numInputs[next] == 0) free.push_back(next);
    }
  }
  return Status::ok();
}

}  // namespace

StageGraph::StageGraph(std::int32_t numStages, std::vector<StageEdge> edges)
    : edges_(std::move(edges)), into_(listBy(numStages, &StageEdge::to)), outOf_(listBy(numStages, &StageEdge::from)) {
  for (std::int32_t stage = 0; stage < numStages; ++stage) {
    std::reverse(into_.edges.begin() + into_.first[stage], into_.edges.begin() + into_.first[stage + 1]);
  }
}

StageGraph::EdgeLists StageGraph::listBy(std::int32_t numStages, std::int32_t StageEdge::*end) const {
  EdgeLists lists;
  lists.first.resize(static_cast<std::size_t>(numStages) + 1);
  for (const StageEdge& edge : edges_) ++lists.first[edge.*end + 1];
  for (std::int32_t stage = 0; stage < numStages; ++stage) lists.first[stage + 1] += lists.first[stage];
  std::vector<std::int32_t> next = lists.first;
  lists.edges.resize(edges_.size());
  for (std::int32_t number = 0; number < numEdges(); ++number) lists.edges[next[edges_[number].*end]++] = number;
  return lists;
}

Result<StageGraph> StageGraph::make(const Plan& plan) {
  std::vector<StageEdge> edges = plan.edges ? *plan.edges : chain(plan.numStages);
  for (const StageEdge& edge : edges) FARANDOLE_RETURN_IF_ERROR(checkEdge(plan, edge));
  std::ranges::sort(edges, {}, [](const StageEdge& edge) { return std::pair(edge.from, edge.to); });
  const auto twice = std::ranges::adjacent_find(edges);
  if (twice != edges.end()) {
    return Status::invalidArgument("edge " + name(*twice) +
                                   " is there twice; expected one, which carries several tensors");
  }
  StageGraph graph(plan.numStages, std::move(edges));
  FARANDOLE_RETURN_IF_ERROR(checkAcyclic(graph, plan.numStages));
  return graph;
}

std::int32_t StageGraph::find(std::int32_t from, std::int32_t to) const {
  const std::span<const std::int32_t> candidates = outOf(from);
  const auto found =
      std::ranges::lower_bound(candidates, to, {}, [&](std::int32_t number) { return edges_[number].to; });
  return found != candidates.end() && edges_[*found].to == to ? *found : kNoEdge;
}

}  // namespace farandole::pipeline
