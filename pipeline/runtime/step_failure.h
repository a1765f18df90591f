#pragma once

#include <string>
#include <vector>

#include "pipeline/runtime/stage.h"
#include "pipeline/runtime/step_agreement.h"

namespace farandole::pipeline {

// Whether this rank still computes in the current step, and what it will report at the step's end. When it no longer
// does, its stages abandon the reduction of gradients at once. One thread.
class StepFailure {
 public:
  StepFailure(std::string rankName, const std::vector<Stage>& stages, bool hasBackward)
      : rankName_(std::move(rankName)), stages_(stages), hasBackward_(hasBackward) {}

  void beginStep();

  // No more computing, for a reason here or on a rank before.
  bool isFailed() const { return isFailed_; }

  // A stage failed here; the first failure is the one reported.
  void fail(const Stage& stage, std::int32_t microbatch, const std::string& text);
  // Something else on this rank keeps the step from running: reported, not abandoned, for no stage has begun.
  void refuse(std::int64_t timeNs, const std::string& text);
  // A stage before this one failed, on a rank that reports it.
  void stopAt(const Stage& stage);
  // Only this: `reason` is told by other means.
  void abandon(const std::string& reason) const;

  const FailureReport& report() const { return report_; }
  const std::string& rankName() const { return rankName_; }

 private:
  const std::string rankName_;
  const std::vector<Stage>& stages_;
  const bool hasBackward_;
  bool isFailed_ = false;
  FailureReport report_;
};

}  // namespace farandole::pipeline
