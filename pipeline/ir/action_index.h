#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"
#include "pipeline/ir/stage_graph.h"

namespace farandole::pipeline {

// Where every compute action, send and receive of a plan stands: the step,
// counted from 0, of the rank that owns its stage. A part of a composite
// action stands where the composite does.
class ActionIndex {
 public:
  static constexpr std::int32_t kAbsent = -1;

  // Refuses a plan in which a number is out of range, a stage runs on a rank
  // that does not own it, an action appears twice, a forward is missing, or a
  // composite is malformed: what is left is safe to index.
  static Result<ActionIndex> build(const Plan& plan);

  const StageGraph& graph() const { return graph_; }

  // Of compute actions.
  std::int32_t step(ActionKind kind, std::int32_t stage, std::int32_t microbatch) const {
    return steps_[slot(kind, stage, microbatch)];
  }
  bool has(ActionKind kind, std::int32_t stage, std::int32_t microbatch) const {
    return step(kind, stage, microbatch) != kAbsent;
  }

  // Of sends and receives.
  std::int32_t messageStep(ActionKind kind, std::int32_t edge, std::int32_t microbatch) const {
    return steps_[slot(kind, edge, microbatch)];
  }

  // Of any of them.
  std::int32_t step(const Action& action) const;

  // B or I, whichever is there.
  std::int32_t inputBackwardStep(std::int32_t stage, std::int32_t microbatch) const;

  // A plan without any backward is forward-only.
  bool hasBackward() const { return hasBackward_; }

 private:
  // The kinds that are indexed come first in the enumeration.
  static constexpr std::size_t kNumKinds = static_cast<std::size_t>(ActionKind::kRecvB) + 1;

  ActionIndex(const Plan& plan, StageGraph graph);
  // `row`: a stage, of messages an edge.
  std::size_t slot(ActionKind kind, std::int32_t row, std::int32_t microbatch) const {
    return firstSlot_[static_cast<std::size_t>(kind)] +
           static_cast<std::size_t>(row) * static_cast<std::size_t>(numMicrobatches_) +
           static_cast<std::size_t>(microbatch);
  }
  std::size_t slot(const Action& action) const;
  Status add(const Plan& plan, const Action& leaf, std::int32_t rank, std::int32_t step);

  StageGraph graph_;
  std::int32_t numMicrobatches_;
  bool hasBackward_ = false;
  std::array<std::size_t, kNumKinds> firstSlot_;
  std::vector<std::int32_t> steps_;  // [kind][stage or edge][microbatch]
};

}  // namespace farandole::pipeline
