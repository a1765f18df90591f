// What a backward sets off in a GradReducer.

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <exception>
#include <string>
#include <utility>

#include "ddp/grad_reducer.h"
#include "ddp/round_trouble.h"

namespace farandole::ddp {

void GradReducer::onGradReady(int parameter, const at::Tensor& brought) {
  const ModelParameter& named = parameters_[parameter];
  std::unique_lock lock(mutex_);
  if (!abandoned_.empty()) return;
  checkHasMemory();
  TORCH_CHECK(!isExplicit_, "farandole.ddp: parameter '", named.name,
              "' got a gradient between start_grad_sync() and finish_grad_sync(), while gradients are reduced: call "
              "finish_grad_sync() before backward. The gradients of this step are not to be used");
  const bool isInRound = requireSync_ && (options_.overlaps || endsWithBackward_);
  std::string overrun = gradients_.addTo(parameter, brought);
  std::string trouble = troubleWith(named, brought);
  const bool isGraph = at::GradMode::is_enabled();
  c10::NoGradGuard noGrad;
  if (isInRound) {
    note(std::move(overrun));
    note(std::move(trouble));
  } else {  // where the next round tells of an overrun
    TORCH_CHECK(trouble.empty(), "farandole.ddp: ", trouble);
  }
  isFinished_ = false;
  // A function may give no gradient for a parameter that it was called with.
  const bool isUsed = brought.defined() || unused_ != UnusedParameters::kSkip || gradients_.isAddedByKernel(parameter);
  if (isUsed) touched_[parameter] = 1;
  // Where nothing is issued before finishSync(), that opens the round.
  if (!isInRound) {
    const bool stays = gradients_.home() == Gradients::Home::kGrad;
    if (!named.tensor.grad().defined()) return;
    trouble = gradients_.accumulate(parameter, stays ? brought : at::Tensor());
    TORCH_CHECK(trouble.empty(), "farandole.ddp: ", trouble);
    const int task = torch::autograd::get_current_graph_task_id();
    if (std::exchange(earlyTask_, task) != task) early_.clear();
    early_.push_back(parameter);
    return;
  }
  if (endsWithBackward_) queueBackwardEnd();
  inRound_ = true;
  hasArrivals_ = true;
  if (!isUsed) return;
  const int arrived = ++arrived_[parameter];
  if (!isCounting_ && arrived > expected_[parameter]) {
    note(hasCounted_ ? describeMore(named.name, expected_[parameter], options_.endsWithBackward)
                     : describeTwice(named.name));
    gradients_.drop(parameter);
    return;
  }
  note(gradients_.accumulate(parameter, !isGraph && borrows(parameter) ? brought : at::Tensor()));
  streams_.note();
  if (isCounting_ || arrived < expected_[parameter]) return;
  if (timeline_) timeline_->mark(Timeline::Kind::kReady, parameter);
  markReady(parameter);
  if (!options_.overlaps) return;
  if (const std::exception_ptr failure = issueReady()) {
    lock.unlock();
    throwWithReason(failure);
  }
}

// Other ranks come to the collectives of a round: it goes on to its end, where all are told.
void GradReducer::note(std::string trouble) {
  if (finding_.empty()) finding_ = std::move(trouble);
}

// Of one that gets nothing in this round. What no rank has added to is skipped, and stays what it is.
void GradReducer::noteStale(int parameter) {
  const bool isSkipped = unused_ == UnusedParameters::kSkip && !touched_[parameter] && !buffers_->isSharded();
  if (!isSkipped) note(gradients_.troubleWithMore(parameter));
}

bool GradReducer::borrows(int parameter) const {
  if (gradients_.home() == Gradients::Home::kGrad) return true;
  return !options_.checks.isEnabled() && !isCounting_ && expected_[parameter] == 1 && issuer_.takesPart(parameter);
}

// Where gradients come inside inner backwards alone, nothing else queues the callback of the outer one; and where none
// come, on this rank, other ranks may wait.
void GradReducer::onOutputReached(bool isOwn) {
  const bool isForParameters = isOwn && this->isForParameters();
  std::lock_guard lock(mutex_);
  if (!abandoned_.empty()) return;
  if (!requireSync_) {
    if (!isForParameters || isSyncHeld_) return;
    beginLateSync();
  }
  queueBackwardEnd();
  if (!inRound_) outputTask_ = callbackTask_;
  if (isForParameters || !change_.empty()) inRound_ = true;
}

bool GradReducer::isForParameters() const {
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (parameters_[p].tensor.requires_grad() && hooks_[p].isAskedFor()) return true;
  }
  return false;
}

void GradReducer::beginLateSync() {
  requireSync_ = isSyncLate_ = true;
  if (earlyTask_ != torch::autograd::get_current_graph_task_id()) return;
  hasArrivals_ = !early_.empty();
  for (int parameter : early_) {
    note(gradients_.overrunOf(parameter));
    const int arrived = ++arrived_[parameter];
    if (!isCounting_ && arrived == expected_[parameter]) markReady(parameter);
  }
  earlyTask_ = -1;
}

void GradReducer::queueBackwardEnd() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == callbackTask_) return;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), task] { self->onBackwardEnd(task); });
  callbackTask_ = task;
}

void GradReducer::markReady(int parameter) {
  ready_[parameter] = 1;
  ++readyCount_;
  issuer_.markReady(parameter);
}

}  // namespace farandole::ddp
