// How the rounds of a GradReducer end.

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <optional>
#include <utility>

#include "ddp/abandonment.h"
#include "ddp/grad_reducer.h"
#include "ddp/round_trouble.h"
#include "ddp/untold_trouble.h"

namespace farandole::ddp {
namespace {

// True inside a node of an outer backward, e.g. of a reentrant checkpoint.
bool insideBackwardNode() { return torch::autograd::get_current_node() != nullptr; }

}  // namespace

void GradReducer::onBackwardEnd(int task) {
  {
    std::lock_guard lock(mutex_);
    // The end of a backward inside the one of the forward, which may bring the other gradients.
    if (readyCount_ < parameters_.size() && task != outputTask_ && insideBackwardNode()) return;
  }
  try {
    finishRound(RoundEnd::kBackward);
  } catch (...) {
    // The engine calls nobody after one that throws, and rounds of other models end with this backward, too.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [failure = std::current_exception()] { std::rethrow_exception(failure); });
  }
}

void GradReducer::requireManualEnd(bool isManual) {
  std::lock_guard lock(mutex_);
  checkUsable();
  TORCH_CHECK(options_.endsWithBackward,
              "farandole.ddp: require_manual_backward_finalization: finish_grad_sync() ends "
              "the rounds of this wrapper");
  TORCH_CHECK(!inRound_, "farandole.ddp: require_manual_backward_finalization=", isManual ? "True" : "False",
              " while gradients are reduced: expected before a forward, or after the end of its backward");
  endsWithBackward_ = !isManual;
}

bool GradReducer::isEndManual() {
  std::lock_guard lock(mutex_);
  return !endsWithBackward_;
}

bool GradReducer::needsWholeBackward() {
  std::lock_guard lock(mutex_);
  return isCounting_ || !options_.overlaps || unused_ != UnusedParameters::kError;
}

void GradReducer::finishBackward() {
  bool isOpen = false;
  {
    std::lock_guard lock(mutex_);
    checkUsable();
    TORCH_CHECK(
        !endsWithBackward_,
        "farandole.ddp: finalize_backward(): expected require_manual_backward_finalization=True before the forward");
    isOpen = inRound_;
    TORCH_CHECK(
        isOpen || (requireSync_ && lookedInRound_ == rounds_),  // there was a forward
        "farandole.ddp: finalize_backward() without gradients that are to be averaged: expected once after each "
        "backward whose forward was outside of no_sync()");
    const bool isInside = torch::autograd::get_current_graph_task_id() != -1;
    TORCH_CHECK(!isInside || readyCount_ == parameters_.size(),
                "farandole.ddp: finalize_backward() inside a backward, with ", readyCount_, " of ", parameters_.size(),
                " gradients: expected behind the last one, or, where should_finalize_after_backward says so, after "
                "backward() has returned");
    inRound_ = isOpen || options_.overlaps;  // where all gradients are missing that is told at its end
  }
  if (!isOpen && !options_.overlaps) (void)openRound();  // whose trouble comes at its end, too
  finishRound(RoundEnd::kExplicit);
}

void GradReducer::noteTrouble(const std::string& trouble) {
  std::lock_guard lock(mutex_);
  checkUsable();
  note(trouble);
  isFinished_ = false;
}

void GradReducer::failRound(const std::string& trouble) {
  // Others that cannot be told would go on with zeros for this rank's gradients.
  TORCH_CHECK(groups_.dense.size() == 1 || RoundReport::canTell(groups_.dense), "farandole.ddp: ", trouble);
  noteTrouble(trouble);
  {
    std::lock_guard lock(mutex_);
    inRound_ = true;
  }
  finishRound(RoundEnd::kExplicit);
}

std::vector<int> GradReducer::markRest(RoundEnd end) {
  // Only one that has come to its end, and was none of several that failed, shows what one brings.
  const bool counts = isCounting_ && hasArrivals_ && end != RoundEnd::kAbandoned && finding_.empty();
  const bool notesUse = unused_ == UnusedParameters::kErrorInUsedGroup;
  std::vector<int> unused;
  c10::NoGradGuard noGrad;
  issuer_.endArrivals();
  for (size_t p = 0; p < ready_.size(); ++p) {
    const int parameter = static_cast<int>(p);
    if (notesUse && arrived_[p] > 0) isGroupUsed_[issuer_.bucketGroupOf(parameter)] = 1;
    if (ready_[p]) continue;
    if (arrived_[p] == 0) {
      unused.push_back(parameter);
      noteStale(parameter);
      note(gradients_.fill(parameter, unused_ != UnusedParameters::kSkip));
      keep(parameter);
    }
    if (counts) expected_[p] = std::max(arrived_[p], 1);
    markReady(parameter);
  }
  if (counts) {
    isCounting_ = false;
    hasCounted_ = true;
  }
  // What came of it shows no order: it was cut short, or nothing was ready before its end.
  if (counts || end == RoundEnd::kAbandoned) hasArrivals_ = false;
  return unused;
}

// What no rank has added to is not to be reduced once more, which would multiply a sum.
void GradReducer::keep(int parameter) {
  if (unused_ != UnusedParameters::kSkip || touched_[parameter]) return;
  if (gradients_.home() != Gradients::Home::kMainGrad && !parameters_[parameter].tensor.grad().defined()) return;
  kept_.emplace_back(parameter, buffers_->mainGrads()[parameter].clone());
}

void GradReducer::finishRound(RoundEnd end) {
  std::vector<int> unused;
  std::vector<int> idle;
  std::optional<int> untrained;
  std::string trouble;
  std::optional<UntoldTrouble> untold;
  std::exception_ptr failure;
  try {
    std::exception_ptr issued;
    {
      std::lock_guard lock(mutex_);
      if (!inRound_) return;
      unused = markRest(end);
      issued = issueReady();
      trouble = troubleOf(unused, end);
      // A call makes its round whatever forwards have given.
      if (end == RoundEnd::kBackward) untrained = untrained_;
      unused.insert(unused.end(), leftOut_.begin(), leftOut_.end());
      std::copy_if(unused.begin(), unused.end(), std::back_inserter(idle), [this](int p) { return !touched_[p]; });
    }
    untold.emplace(trouble);
    if (issued) throwWithReason(issued);
    trouble = awaitRound(idle, trouble, untrained);
    untold.reset();
  } catch (...) {
    failure = std::current_exception();
  }
  {
    std::lock_guard lock(mutex_);
    if (!failure && unused_ == UnusedParameters::kSkip) {
      for (int parameter : unused) {
        if (report_.flag(parameter)) gradients_.show(parameter);
      }
      for (const auto& [parameter, grad] : kept_) {
        if (!report_.flag(parameter)) buffers_->mainGrads()[parameter].copy_(grad);
      }
    }
    if (inRound_) resetRound();  // throwFailure() may have
    synchronized_ = !failure;
  }
  if (failure && untold) untold->throwWith(failure);
  if (failure) std::rethrow_exception(failure);
  TORCH_CHECK(trouble.empty(), "farandole.ddp: ", trouble);
}

// Reports come after the buckets, so that a group that was given up has no more of them under way.
std::string GradReducer::awaitRound(const std::vector<int>& idle, const std::string& trouble,
                                    std::optional<int> untrained) {
  const std::shared_ptr<Timeline> timeline = timeline_;  // stays what it is until the round's end
  try {
    const std::size_t wait = timeline ? timeline->begin(Timeline::Kind::kWait) : 0;
    issuer_.await();
    if (timeline) timeline->end(wait);
    const std::size_t telling = timeline ? timeline->begin(Timeline::Kind::kReport) : 0;
    std::vector<char> used(unused_ == UnusedParameters::kSkip ? parameters_.size() : 0, 1);
    if (!used.empty()) {
      for (int parameter : idle) used[parameter] = 0;
    }
    report_.start(trouble, untrained, issuer_.departures(hasArrivals_), used);
    std::string all = report_.finish();
    issuer_.agreeOnOrder(report_);
    if (timeline) timeline->end(telling);
    return all;
  } catch (const std::exception&) {
    throwWithReason(std::current_exception());
  }
}

void GradReducer::resetRound() {
  clearRound();
  std::fill(touched_.begin(), touched_.end(), 0);
  isFinished_ = true;
  gradients_.markReduced();
}

void GradReducer::clearRound() {
  issuer_.reset();
  gradients_.dropBorrowed();
  streams_.clear();
  std::fill(ready_.begin(), ready_.end(), 0);
  std::fill(arrived_.begin(), arrived_.end(), 0);
  readyCount_ = 0;
  hasArrivals_ = false;
  finding_.clear();
  kept_.clear();
  leftOut_.clear();
  untrained_ = 0;
  inRound_ = isExplicit_ = false;
  if (std::exchange(isSyncLate_, false)) requireSync_ = false;
  ++rounds_;
  if (timeline_) timeline_->endRound();
  takeTimeline();
}

void GradReducer::throwWithReason(const std::exception_ptr& failure) {
  {
    std::lock_guard lock(mutex_);
    checkUsable();
  }
  const std::string why = abandonmentOf(group_);
  {
    std::lock_guard lock(mutex_);
    if (abandoned_.empty()) abandoned_ = why;
  }
  if (!why.empty()) leaveAbandoned();
  {
    std::lock_guard lock(mutex_);
    checkUsable();
  }
  try {
    std::rethrow_exception(failure);
  } catch (const HookFailure& ofHook) {
    throwFailure(ofHook);
  }
}

void GradReducer::throwFailure(const HookFailure& failure) {
  if (haveAllFailed(group_, failure.bucket)) {
    try {
      // Buckets before it, of which this is the first to fail.
      issuer_.await();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): `failure`, or one like it
    }
    std::lock_guard lock(mutex_);
    if (inRound_) resetRound();
    synchronized_ = false;
  } else {
    abandon(nameOfThis() + ": " + failure.describe());
  }
  std::rethrow_exception(failure.cause);
}

std::string GradReducer::nameOfThis() const { return "rank " + std::to_string(group_.getRank()) + " of the group"; }

std::string GradReducer::troubleOf(const std::vector<int>& unused, RoundEnd end) const {
  const std::string self = nameOfThis() + ": ";
  if (end == RoundEnd::kAbandoned) {
    const std::string ending = options_.endsWithBackward ? "finalize_backward()" : "finish_grad_sync()";
    const bool hasAll = !options_.endsWithBackward && hasCounted_ && unused.empty();
    return self + describeAbandoned(parameters_, unused, endsWithBackward_ ? "" : ending) +
           (hasAll ? ". The gradients that the first batch had were all there" : "");
  }
  if (!change_.empty()) return self + change_;
  if (!finding_.empty()) return self + finding_;
  const std::vector<int> wrong = wrongOf(unused);
  if (wrong.empty()) return "";
  const bool isToldByOption = unused_ == UnusedParameters::kError;
  return self + describeUnused(
                    parameters_, wrong,
                    isToldByOption ? "pass unused_parameters='zero_fill' or 'skip'" : "pass overlap_grad_reduce=False");
}

std::vector<int> GradReducer::wrongOf(const std::vector<int>& unused) const {
  if (unused_ == UnusedParameters::kError) return unused;
  std::vector<int> wrong;
  if (unused_ != UnusedParameters::kErrorInUsedGroup) return wrong;
  std::copy_if(unused.begin(), unused.end(), std::back_inserter(wrong),
               [this](int p) { return isGroupUsed_[issuer_.bucketGroupOf(p)] != 0; });
  return wrong;
}

}  // namespace farandole::ddp
