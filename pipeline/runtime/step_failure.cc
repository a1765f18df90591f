#include "pipeline/runtime/step_failure.h"

namespace farandole::pipeline {

void StepFailure::beginStep() {
  isFailed_ = false;
  report_ = {};
}

void StepFailure::fail(const Stage& stage, std::int32_t microbatch, const std::string& text) {
  isFailed_ = true;
  if (report_.failed) return;
  const std::string where = "stage " + std::to_string(stage.spec.index) + ", microbatch " + std::to_string(microbatch);
  report_ = {true, systemTimeNs(), rankName_ + ", " + where + ": " + text};
  abandon(report_.text);
}

void StepFailure::refuse(std::int64_t timeNs, const std::string& text) {
  if (!report_.failed) report_ = {true, timeNs, rankName_ + text};
}

void StepFailure::stopAt(const Stage& stage) {
  if (isFailed_) return;
  isFailed_ = true;
  abandon(rankName_ + ": a stage before stage " + std::to_string(stage.spec.index) + " of its pipeline failed");
}

void StepFailure::abandon(const std::string& reason) const {
  if (!hasBackward_) return;
  for (const Stage& stage : stages_) {
    if (stage.spec.abandonGradSync) stage.spec.abandonGradSync(reason);
  }
}

}  // namespace farandole::pipeline
