#include "ddp/grad_reducer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "ddp/abandonment.h"
#include "ddp/backward_sink.h"
#include "ddp/round_trouble.h"

namespace farandole::ddp {

void GradReducer::setRequireSync(bool requireSync) {
  std::lock_guard lock(mutex_);
  checkUsable();
  requireSync_ = requireSync;
  isSyncLate_ = false;
  isSyncHeld_ = !requireSync;
  untrained_ = 0;  // its caller makes the round in any case
  if (!requireSync) synchronized_ = false;
}

void GradReducer::prepareForward(bool requireSync, const std::string& change) {
  {
    std::lock_guard lock(mutex_);
    checkUsable();
    requireSync_ = requireSync;
    isSyncLate_ = false;
    if (requireSync) isSyncHeld_ = false;
    if (lookedInRound_ != rounds_) {
      lookForChange();
      if (!inRound_) gradients_.release();
    }
    if (!change.empty()) change_ = change;
    if (!change_.empty()) isFinished_ = false;  // it is to be told also where no gradient comes
    if (!inRound_ || expectsMore()) return;
  }
  finishRound(RoundEnd::kAbandoned);
}

bool GradReducer::expectsMore() const {
  if (options_.endsWithBackward || isExplicit_ || !hasArrivals_) return false;
  return isCounting_ || readyCount_ == 0;
}

void GradReducer::holdParameters() {
  std::lock_guard lock(mutex_);
  held_.clear();
  for (const ModelParameter& parameter : parameters_) held_.push_back(parameter.tensor.const_data_ptr());
}

void GradReducer::lookForChange() {
  lookedInRound_ = rounds_;
  std::vector<int> retyped;
  std::vector<int> moved;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const at::Tensor& tensor = parameters_[p].tensor;
    if (!hooks_[p].isOn(tensor)) {
      retyped.push_back(static_cast<int>(p));
    } else if (!held_.empty() && tensor.const_data_ptr() != held_[p]) {
      moved.push_back(static_cast<int>(p));
    }
  }
  change_ = describeChange(parameters_, retyped, moved);
}

void GradReducer::setCommHook(std::shared_ptr<c10d::CommHookInterface> hook) {
  std::lock_guard lock(mutex_);
  checkUsable();
  TORCH_CHECK(!hasCommHook_, "farandole.ddp: register_comm_hook: there is one already: expected one call at most");
  TORCH_CHECK(!inRound_, "farandole.ddp: register_comm_hook while gradients are reduced: expected between steps");
  CommHook::check(*buffers_, groups_);
  gradients_.moveIntoBuffers();
  issuer_.setHook(std::make_shared<CommHook>(std::move(hook), buffers_, groups_.dense.group));
  hasCommHook_ = true;
}

bool GradReducer::watchOutputs(const std::vector<at::Tensor>& outputs, bool isOwn) {
  if (isEndManual()) return true;  // its caller makes the round in any case
  onBackwardOf(outputs, [weak = weak_from_this(), isOwn] {
    if (auto self = weak.lock()) self->onOutputReached(isOwn);
  });
  const auto needsGrad = [](const at::Tensor& output) { return output.defined() && output.requires_grad(); };
  return std::any_of(outputs.begin(), outputs.end(), needsGrad);
}

void GradReducer::noteUntrained() {
  std::lock_guard lock(mutex_);
  ++untrained_;
}

void GradReducer::startSync() {
  const std::string unfit = openRound();
  TORCH_CHECK(unfit.empty(), "farandole.ddp: ", unfit);  // the others learn of it from finishSync()
}

std::string GradReducer::openRound() {
  std::unique_lock lock(mutex_);
  checkUsable();
  TORCH_CHECK(!inRound_,
              "farandole.ddp: start_grad_sync() while a synchronization is open: call finish_grad_sync() first");
  c10::NoGradGuard noGrad;
  std::string unfit;
  inRound_ = isExplicit_ = true;
  for (int parameter = 0; parameter < static_cast<int>(parameters_.size()); ++parameter) {
    const bool isLeftOut =
        unused_ == UnusedParameters::kSkip && !touched_[parameter] && !gradients_.isReplaced(parameter);
    noteStale(parameter);
    const std::string misfit = gradients_.fill(parameter, !isLeftOut);
    if (unfit.empty()) unfit = misfit;
    if (isLeftOut) {
      keep(parameter);
      leftOut_.push_back(parameter);
    }
    markReady(parameter);
  }
  note(unfit);
  const std::exception_ptr failure = issueReady();
  lock.unlock();
  if (failure) throwWithReason(failure);
  return unfit;
}

void GradReducer::finishSync() {
  bool isOpen = false;
  {
    std::lock_guard lock(mutex_);
    checkUsable();
    isOpen = inRound_;
    if (!isOpen && (options_.endsWithBackward || isFinished_)) return;
  }
  if (!isOpen) (void)openRound();  // whose trouble comes at its end
  finishRound(RoundEnd::kExplicit);
}

void GradReducer::abandon(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (!abandoned_.empty()) return;
    abandoned_ = why;
  }
  for (const Replicas* replicas : {&groups_.dense, &groups_.experts}) {
    if (replicas == &groups_.experts && replicas->group == groups_.dense.group) continue;
    abandonGroup(*replicas->group, why);
    if (replicas->instances) abandonGroup(*replicas->instances, why);
  }
}

void GradReducer::leaveAbandoned() {
  const c10::DeviceType device = buffers_->device().type();
  for (const Replicas* replicas : {&groups_.dense, &groups_.experts}) {
    ddp::leaveAbandoned(*replicas->group, device);
    if (replicas->instances) ddp::leaveAbandoned(*replicas->instances, device);
  }
}

void GradReducer::follow(GradReducer& other) {
  std::scoped_lock lock(mutex_, other.mutex_);
  touched_ = other.touched_;
  untrained_ = other.untrained_;
  gradients_.follow(other.gradients_);
}

void GradReducer::beginStep() {
  std::lock_guard lock(mutex_);
  checkUsable();
  synchronized_ = false;
}

bool GradReducer::isSynchronized() {
  std::lock_guard lock(mutex_);
  return synchronized_;
}

void GradReducer::checkUsable() const {
  TORCH_CHECK(abandoned_.empty(), "farandole.ddp: rank ", group_.getRank(),
              " of the group cannot average gradients any more: ", abandoned_);
  checkHasMemory();
}

void GradReducer::checkHasMemory() const {
  TORCH_CHECK(!areGradsFree_,
              "farandole.ddp: the memory of gradients was given back by offload_grad_buffers(): call "
              "restore_grad_buffers() first");
}

void GradReducer::zeroGrads() {
  std::lock_guard lock(mutex_);
  checkHasMemory();
  noteReset();
  gradients_.zero();
  isFinished_ = false;
}

void GradReducer::noteReset() {
  if (options_.endsWithBackward || !inRound_ || !hasArrivals_) return;
  note(
      "gradients were reset before finish_grad_sync() was called for the last batch (did it raise?): expected that "
      "call first. These are not to be used");
}

void GradReducer::forgetGrads() {
  std::lock_guard lock(mutex_);
  noteReset();
  gradients_.forget();
  isFinished_ = false;
}

void GradReducer::forgetSomeGrads(const std::vector<int>& parameters, bool zeroes) {
  std::lock_guard lock(mutex_);
  checkHasMemory();
  gradients_.forgetSome(parameters, zeroes);
  isFinished_ = false;
}

bool GradReducer::isReduced() {
  std::lock_guard lock(mutex_);
  return gradients_.isReduced();
}

std::string GradReducer::overrun() {
  std::lock_guard lock(mutex_);
  return inRound_ || areGradsFree_ ? "" : gradients_.overrun();
}

void GradReducer::freeGrads() {
  std::lock_guard lock(mutex_);
  if (areGradsFree_) return;
  checkUsable();
  TORCH_CHECK(gradients_.home() == Gradients::Home::kMainGrad && !inRound_,
              "farandole.ddp: gradients' memory is given back ",
              inRound_ ? "while they are reduced" : "while .grad has it",
              ": expected gradients in main_grad alone, between steps");
  gradients_.forget();
  buffers_->freeGrads();
  areGradsFree_ = true;
  isFinished_ = false;
}

void GradReducer::restoreGrads() {
  std::lock_guard lock(mutex_);
  if (!areGradsFree_) return;
  buffers_->restoreGrads();
  areGradsFree_ = false;
  gradients_.zero();
}

void GradReducer::checkGrads() {
  std::lock_guard lock(mutex_);
  checkHasMemory();
}

void GradReducer::scaleGrads(double factor) {
  std::lock_guard lock(mutex_);
  checkHasMemory();
  buffers_->scaleGrads(factor);
}

std::exception_ptr GradReducer::issueReady() {
  try {
    issuer_.issue([this](int bucket) {
      streams_.join();
      if (options_.checks.isEnabled() && finding_.empty()) finding_ = troubleIn(*buffers_, bucket, options_.checks);
      return gradients_.takeParts(bucket);
    });
    return nullptr;
  } catch (const std::exception&) {
    return std::current_exception();
  }
}

void GradReducer::record(std::shared_ptr<Timeline> timeline) {
  std::lock_guard lock(mutex_);
  nextTimeline_ = std::move(timeline);
  if (!inRound_) takeTimeline();
}

void GradReducer::takeTimeline() {
  if (timeline_ == nextTimeline_) return;
  timeline_ = nextTimeline_;
  issuer_.record(timeline_);
}

int GradReducer::rounds() {
  std::lock_guard lock(mutex_);
  return rounds_;
}

bool GradReducer::isInRound() {
  std::lock_guard lock(mutex_);
  return inRound_;
}

}  // namespace farandole::ddp
