#include "ddp/grad_reducer.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

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
    if (!inRound_) return;
  }
  finishRound(RoundEnd::kAbandoned);
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
  hasCommHook_ = isOrderLearned_ = true;
}

void GradReducer::watchOutputs(const std::vector<at::Tensor>& outputs, bool isOwn) {
  if (isEndManual()) return;
  onBackwardOf(outputs, [weak = weak_from_this(), isOwn] {
    if (auto self = weak.lock()) self->onOutputReached(isOwn);
  });
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
    note(gradients_.troubleWithMore(parameter));
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
  gradients_.zero();
  isFinished_ = false;
}

void GradReducer::forgetGrads() {
  std::lock_guard lock(mutex_);
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

void GradReducer::onGradReady(int parameter, const at::Tensor& brought) {
  const ModelParameter& named = parameters_[parameter];
  std::unique_lock lock(mutex_);
  if (!abandoned_.empty()) return;
  checkHasMemory();
  TORCH_CHECK(!isExplicit_, "farandole.ddp: parameter '", named.name,
              "' got a gradient between start_grad_sync() and finish_grad_sync(), while gradients are reduced: call "
              "finish_grad_sync() before backward. The gradients of this step are not to be used");
  const bool isInRound = requireSync_ && (options_.overlaps || endsWithBackward_);
  std::string trouble = gradients_.troubleWithMore(parameter);
  if (trouble.empty()) trouble = troubleWith(named, brought);
  const bool isGraph = at::GradMode::is_enabled();
  c10::NoGradGuard noGrad;
  if (isInRound) {
    note(std::move(trouble));
  } else {
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
    note("parameter '" + named.name +
         "' got its gradient twice in one backward that synchronizes: is it used by several reentrant checkpoints? Use "
         "checkpoint(..., use_reentrant=False), or, where every backward is alike, static_graph=True or "
         "_set_static_graph()");
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
