#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/common/status.h"
#include "pipeline/ir/plan.h"

namespace farandole::pipeline {

// Where microbatches enter and leave a plan's graph of stages.
class PlanEnds {
 public:
  // Refuses what is no graph, and microbatches with several last stages: one computes the loss.
  static Result<PlanEnds> of(const Plan& plan);

  bool isFirst(std::int32_t stage) const { return isFirst_[stage]; }
  bool isLast(std::int32_t stage) const { return last_[stage].size() > 0; }

  // Of each copy of the model, where a plan has several: its gradients are means over those.
  Result<std::int32_t> microbatchesOfOneModel() const;

  // Ascending.
  std::vector<std::int32_t> microbatchesThatEndIn(std::span<const std::int32_t> stages) const;

 private:
  std::vector<bool> isFirst_;
  std::vector<MicrobatchRange> last_;  // [stages] what ends there; empty where a stage follows
};

}  // namespace farandole::pipeline
