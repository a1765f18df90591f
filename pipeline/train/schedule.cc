#include "pipeline/train/schedule.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <string>
#include <utility>

#include "pipeline/runtime/step_agreement.h"

namespace farandole::pipeline {

Schedule::Schedule(ScheduleConfig config) : config_(std::move(config)) {
  std::ranges::sort(config_.stages, {}, &ModuleStage::index);
}

Result<StepResult> Schedule::step(const Batch& batch) { return run(training_, true, batch); }

Result<StepResult> Schedule::eval(const Batch& batch) { return run(evaluation_, false, batch); }

Result<StepResult> Schedule::run(std::unique_ptr<ScheduleRun>& run, bool trains, const Batch& batch) {
  if (isRunning_) return Status::invalidArgument("a step was called from within a step of the same schedule");
  isRunning_ = true;
  const auto ended = c10::make_scope_exit([this] { isRunning_ = false; });
  if (run == nullptr) {
    auto made = ScheduleRun::make(config_, trains);
    if (!made) return refuse(made.status());
    run = std::move(made).value();
  }
  return run->step(batch);
}

// The other ranks learn why this one does not run from the beginning of their step.
Status Schedule::refuse(const Status& reason) const {
  const std::string text = "rank " + std::to_string(config_.rank()) + ": " + reason.toString();
  if (config_.numRanks() > 1) {
    try {
      refuseStep(config_.backend, text);
    } catch (...) {
      // What matters here is this rank's own error.
    }
  }
  return Status::invalidArgument("the step cannot run: " + text);
}

}  // namespace farandole::pipeline
