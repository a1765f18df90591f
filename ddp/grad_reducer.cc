#include "ddp/grad_reducer.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "ddp/abandonment.h"

namespace farandole::ddp {
namespace {

constexpr size_t kMaxNames = 20;  // in one error

std::string joinNames(const std::vector<ModelParameter>& parameters, const std::vector<int>& indices) {
  std::string text;
  for (size_t i = 0; i < std::min(indices.size(), kMaxNames); ++i) {
    text += (i == 0 ? "'" : ", '") + parameters[indices[i]].name + "'";
  }
  if (indices.size() > kMaxNames) text += " and " + std::to_string(indices.size() - kMaxNames) + " more";
  return text;
}

// True inside a node of an outer backward, e.g. of a reentrant checkpoint.
bool insideBackwardNode() { return torch::autograd::get_current_node() != nullptr; }

// Where the ranks compare their models: where the parameters are, else where the group has a backend.
c10::Device exchangeDevice(c10d::ProcessGroup& group, const std::vector<ModelParameter>& trainable) {
  if (!trainable.empty() && !trainable[0].tensor.is_meta()) return trainable[0].tensor.device();
  const auto devices = group.getDeviceTypes();
  return hasCpuBackend(group) || devices.empty() ? c10::Device(at::kCPU) : devices.front();
}

}  // namespace

std::shared_ptr<GradReducer> GradReducer::create(const DataParallelGroups& groups, const Model& model,
                                                 const ReducerOptions& options, Gradients::IsAdded isAdded) {
  std::vector<Fact> facts = factsOf(options, groups);
  for (Fact& fact : ddp::factsOf(model)) facts.push_back(std::move(fact));
  std::string refusal = refusalOf(model, options.buffers);
  if (refusal.empty() && options.unused == UnusedParameters::kSkip && groups.dense.size() > 1 &&
      !RoundReport::canTell(groups.dense)) {
    refusal =
        "unused_parameters='skip': expected a group with a backend for the CPU, too, where ranks tell what they used";
  }
  for (const Group& group : {groups.dense.group, groups.dense.instances}) {
    if (group) checkAgreement(*group, exchangeDevice(*group, trainableOf(model)), facts, refusal);
  }
  if (options.broadcasts) broadcastModel(groups, model);
  std::shared_ptr<GradReducer> reducer(new GradReducer(
      groups, std::make_shared<ModelBuffers>(model, groups, options.buffers), options, std::move(isAdded)));
  reducer->attachHooks();
  return reducer;
}

GradReducer::GradReducer(DataParallelGroups groups, std::shared_ptr<ModelBuffers> buffers,
                         const ReducerOptions& options, Gradients::IsAdded isAdded)
    : groups_(std::move(groups)),
      buffers_(std::move(buffers)),
      parameters_(buffers_->parameters()),
      options_(options),
      group_(*groups_.dense.group),
      gradients_(buffers_, options.home, std::move(isAdded)),
      issuer_(groups_, *buffers_, options),
      expected_(parameters_.size(), 1),
      arrived_(parameters_.size(), 0),
      ready_(parameters_.size(), 0),
      isCounting_(options.isGraphStatic),
      report_(groups_, options.unused == UnusedParameters::kSkip ? parameters_.size() : 0) {}

void GradReducer::attachHooks() {
  hooks_.reserve(parameters_.size());
  for (size_t p = 0; p < parameters_.size(); ++p) {
    hooks_.emplace_back(parameters_[p].tensor,
                        [weak = weak_from_this(), parameter = static_cast<int>(p)](bool hasGradient) {
                          if (auto self = weak.lock()) self->onGradReady(parameter, hasGradient);
                        });
  }
}

void GradReducer::setRequireSync(bool requireSync) {
  std::lock_guard lock(mutex_);
  checkUsable();
  requireSync_ = requireSync;
  if (!requireSync) synchronized_ = false;
}

void GradReducer::prepareForward(bool requireSync) {
  {
    std::lock_guard lock(mutex_);
    checkUsable();
    requireSync_ = requireSync;
    if (!inRound_) return;
  }
  finishRound(RoundEnd::kAbandoned);
}

void GradReducer::startSync() {
  std::lock_guard lock(mutex_);
  checkUsable();
  TORCH_CHECK(!inRound_,
              "farandole.ddp: start_grad_sync() while a synchronization is open: call finish_grad_sync() first");
  c10::NoGradGuard noGrad;
  inRound_ = true;
  for (int parameter = 0; parameter < static_cast<int>(parameters_.size()); ++parameter) {
    gradients_.fill(parameter, true);
    markReady(parameter);
  }
  issueReady();
}

void GradReducer::finishSync() {
  {
    std::lock_guard lock(mutex_);
    checkUsable();
    if (!inRound_ && (options_.endsWithBackward || isFinished_)) return;
  }
  if (!inRound_) startSync();
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
}

void GradReducer::zeroGrads() {
  std::lock_guard lock(mutex_);
  gradients_.zero();
  isFinished_ = false;
}

void GradReducer::forgetGrads() {
  std::lock_guard lock(mutex_);
  gradients_.forget();
  isFinished_ = false;
}

bool GradReducer::isReduced() {
  std::lock_guard lock(mutex_);
  return gradients_.isReduced();
}

void GradReducer::scaleGrads(double factor) {
  std::lock_guard lock(mutex_);
  buffers_->scaleGrads(factor);
}

void GradReducer::onGradReady(int parameter, bool hasGradient) {
  const ModelParameter& named = parameters_[parameter];
  TORCH_CHECK(!at::GradMode::is_enabled(), "farandole.ddp: backward(create_graph=True) is not supported: parameter '",
              named.name, "' would get a gradient that is part of a graph");
  TORCH_CHECK(!hasGradient || named.tensor.grad().defined(), "farandole.ddp: the gradient of parameter '", named.name,
              "' was removed by a hook before it could be reduced");
  std::lock_guard lock(mutex_);
  if (!abandoned_.empty()) return;
  gradients_.checkAccumulates(parameter);
  isFinished_ = false;
  // Where nothing is issued before finishSync(), that opens the round.
  if (!requireSync_ || !(options_.overlaps || options_.endsWithBackward)) {
    if (named.tensor.grad().defined()) gradients_.accumulate(parameter);
    return;
  }
  if (options_.endsWithBackward) queueBackwardEnd();
  inRound_ = true;
  hasArrivals_ = true;
  const int arrived = ++arrived_[parameter];
  TORCH_CHECK(
      isCounting_ || arrived <= expected_[parameter], "farandole.ddp: parameter '", named.name,
      "' got its gradient twice in one backward that synchronizes: is it used by several reentrant "
      "checkpoints? Use checkpoint(..., use_reentrant=False), or static_graph=True where every backward is alike");
  gradients_.accumulate(parameter);
  if (isCounting_ || arrived < expected_[parameter]) return;
  if (timeline_) timeline_->mark(Timeline::Kind::kReady, parameter);
  markReady(parameter);
  if (options_.overlaps) issueReady();
}

void GradReducer::queueBackwardEnd() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == callbackTask_) return;
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->onBackwardEnd(); });
  callbackTask_ = task;
}

void GradReducer::markReady(int parameter) {
  ready_[parameter] = 1;
  ++readyCount_;
  issuer_.markReady(parameter);
}

void GradReducer::issueReady() {
  try {
    issuer_.issue([this](int bucket) {
      if (options_.checks.isEnabled() && finding_.empty()) finding_ = troubleIn(*buffers_, bucket, options_.checks);
    });
  } catch (const std::exception&) {
    rethrowWithReason();
  }
}

void GradReducer::onBackwardEnd() {
  {
    std::lock_guard lock(mutex_);
    // The end of an inner backward: the outer one may bring the other gradients.
    if (readyCount_ < parameters_.size() && insideBackwardNode()) return;
  }
  finishRound(RoundEnd::kBackward);
}

std::vector<int> GradReducer::issueRest() {
  std::vector<int> unused;
  c10::NoGradGuard noGrad;
  for (size_t p = 0; p < ready_.size(); ++p) {
    const int parameter = static_cast<int>(p);
    if (ready_[p]) continue;
    if (arrived_[p] == 0) {
      unused.push_back(parameter);
      gradients_.fill(parameter, options_.unused != UnusedParameters::kSkip);
    }
    if (isCounting_) expected_[p] = std::max(arrived_[p], 1);
    markReady(parameter);
  }
  issueReady();
  isCounting_ = false;
  return unused;
}

void GradReducer::finishRound(RoundEnd end) {
  std::vector<int> unused;
  std::string trouble;
  std::exception_ptr failure;
  try {
    {
      std::lock_guard lock(mutex_);
      if (!inRound_) return;
      unused = issueRest();
      trouble = troubleOf(unused, end);
    }
    trouble = awaitRound(unused, trouble);
  } catch (...) {
    failure = std::current_exception();
  }
  {
    std::lock_guard lock(mutex_);
    if (!failure && options_.unused == UnusedParameters::kSkip) {
      for (int parameter : unused) {
        if (report_.flag(parameter)) gradients_.show(parameter);
      }
    }
    resetRound();
    synchronized_ = !failure;
  }
  if (failure) std::rethrow_exception(failure);
  TORCH_CHECK(trouble.empty(), "farandole.ddp: ", trouble);
}

// Reports come after the buckets, so that a group that was given up has no more of them under way. What an explicit
// round shows is no order of gradients; rank 0 says so, that all learn in the same round.
std::string GradReducer::awaitRound(const std::vector<int>& unused, const std::string& trouble) {
  const std::shared_ptr<Timeline> timeline = timeline_;  // stays what it is until the round's end
  try {
    const std::size_t wait = timeline ? timeline->begin(Timeline::Kind::kWait) : 0;
    issuer_.await();
    if (timeline) timeline->end(wait);
    const std::size_t telling = timeline ? timeline->begin(Timeline::Kind::kReport) : 0;
    std::vector<char> used(options_.unused == UnusedParameters::kSkip ? parameters_.size() : 0, 1);
    if (!used.empty()) {
      for (int parameter : unused) used[parameter] = 0;
    }
    report_.start(trouble, used);
    if (!isOrderLearned_ && options_.overlaps) isOrderLearned_ = issuer_.learnOrder(report_, hasArrivals_);
    std::string all = report_.finish();
    if (timeline) timeline->end(telling);
    return all;
  } catch (const std::exception&) {
    std::lock_guard lock(mutex_);
    rethrowWithReason();
  }
}

void GradReducer::resetRound() {
  issuer_.reset();
  std::fill(ready_.begin(), ready_.end(), 0);
  std::fill(arrived_.begin(), arrived_.end(), 0);
  readyCount_ = 0;
  hasArrivals_ = false;
  finding_.clear();
  inRound_ = false;
  isFinished_ = true;
  gradients_.markReduced();
  ++rounds_;
  if (timeline_) timeline_->endRound();
  takeTimeline();
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

void GradReducer::rethrowWithReason() {
  if (abandoned_.empty()) abandoned_ = abandonmentOf(group_);
  checkUsable();
  throw;
}

std::string GradReducer::troubleOf(const std::vector<int>& unused, RoundEnd end) const {
  const std::string self = "rank " + std::to_string(group_.getRank()) + " of the group: ";
  if (end == RoundEnd::kAbandoned && options_.endsWithBackward) {
    return self +
           "a forward began before the last backward that synchronizes had ended (did it raise?). Without a gradient "
           "in it: " +
           (unused.empty() ? "none" : joinNames(parameters_, unused)) +
           ". It was ended now, so that other ranks do not wait; its gradients are not to be used";
  }
  if (end == RoundEnd::kAbandoned) {
    return self +
           "a forward began before finish_grad_sync() was called. It was called now, so that other ranks do not wait";
  }
  if (!finding_.empty()) return self + finding_;
  if (unused.empty() || options_.unused != UnusedParameters::kError) return "";
  return self + std::to_string(unused.size()) + " of " + std::to_string(parameters_.size()) +
         " parameters got no gradient in a backward that synchronizes: " + joinNames(parameters_, unused) +
         ". They counted as zero, or as what had accumulated before, so that no other rank waits. Where this is "
         "meant, pass unused_parameters='zero_fill' or 'skip'";
}

}  // namespace farandole::ddp
