#pragma once

#include <cstdint>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"

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

  // Of compute actions, sends and receives only.
  std::int32_t step(ActionKind kind, std::int32_t stage, std::int32_t microbatch) const {
    return steps_[slot(kind, stage, microbatch)];
  }
  std::int32_t step(const Action& action) const { return step(action.kind, action.stage, action.microbatch); }
  bool has(ActionKind kind, std::int32_t stage, std::int32_t microbatch) const {
    return step(kind, stage, microbatch) != kAbsent;
  }

  // B or I, whichever is there.
  std::int32_t inputBackwardStep(std::int32_t stage, std::int32_t microbatch) const;

  // A plan without any backward is forward-only.
  bool hasBackward() const { return hasBackward_; }

 private:
  ActionIndex(std::int32_t numStages, std::int32_t numMicrobatches);
  std::size_t slot(ActionKind kind, std::int32_t stage, std::int32_t microbatch) const;
  Status add(const Plan& plan, const Action& leaf, std::int32_t rank, std::int32_t step);

  std::int32_t numStages_;
  std::int32_t numMicrobatches_;
  bool hasBackward_ = false;
  std::vector<std::int32_t> steps_;  // [kind][stage][microbatch]
};

}  // namespace farandole::pipeline
