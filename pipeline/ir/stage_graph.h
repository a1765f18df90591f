#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// The edges between a plan's stages, numbered from 0 in the order of (from, to):
// in a chain an edge has the number of the stage that it comes from.
class StageGraph {
 public:
  static constexpr std::int32_t kNoEdge = -1;

  // Refuses edges of stages that are not there, two that are the same, a cycle,
  // and stages that are joined but do not run the same microbatches. The rest
  // of the plan's frame must be right.
  static Result<StageGraph> make(const Plan& plan);

  std::int32_t numEdges() const { return static_cast<std::int32_t>(edges_.size()); }
  const StageEdge& edge(std::int32_t number) const { return edges_[number]; }

  // The numbers of a stage's edges; where they go up, those of the nearest stages come first, for what passes over them
  // is needed first.
  std::span<const std::int32_t> into(std::int32_t stage) const { return into_.of(stage); }
  std::span<const std::int32_t> outOf(std::int32_t stage) const { return outOf_.of(stage); }

  std::int32_t find(std::int32_t from, std::int32_t to) const;

 private:
  // Lists of edges, one for each stage, one after another.
  struct EdgeLists {
    std::vector<std::int32_t> first;  // [stages + 1], of `edges`
    std::vector<std::int32_t> edges;

    std::span<const std::int32_t> of(std::int32_t stage) const {
      return {edges.data() + first[stage], edges.data() + first[stage + 1]};
    }
  };

  StageGraph(std::int32_t numStages, std::vector<StageEdge> edges);
  EdgeLists listBy(std::int32_t numStages, std::int32_t StageEdge::*end) const;

  std::vector<StageEdge> edges_;
  EdgeLists into_;
  EdgeLists outOf_;
};

}  // namespace farandole::pipeline
