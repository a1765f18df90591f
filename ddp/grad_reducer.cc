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

constexpr int64_t kDefaultBucketSize = 40'000'000;
constexpr int64_t kDefaultBucketSizePerRank = 1'000'000;
constexpr size_t kMaxNames = 20;  // in one error

std::vector<NamedTensor> trainableOf(const Model& model) {
  std::vector<NamedTensor> trainable;
  for (const NamedTensor& parameter : model.parameters) {
    if (parameter.tensor.requires_grad()) trainable.push_back(parameter);
  }
  return trainable;
}

// Why this rank cannot be part of a data-parallel group; empty when it can.
std::string refusalOf(const std::vector<NamedTensor>& trainable, const ReducerOptions& options) {
  if (trainable.empty()) return "the module has no parameter that requires a gradient";
  if (options.bucketSize && *options.bucketSize < 1) {
    return "bucket_size=" + std::to_string(*options.bucketSize) + ": expected at least 1 element";
  }
  const c10::Device device = trainable[0].tensor.device();
  for (const auto& [name, tensor] : trainable) {
    if (tensor.device() != device) {
      return "parameter '" + name + "' is on " + tensor.device().str() + ", '" + trainable[0].name + "' on " +
             device.str() + ": expected all on one device";
    }
    if (tensor.is_meta()) return "parameter '" + name + "' is on meta: expected a device with memory";
    if (tensor.layout() != at::kStrided) return "parameter '" + name + "' is sparse: expected a dense one";
    if (!tensor.is_leaf()) return "parameter '" + name + "' is computed from others: expected a leaf";
  }
  return "";
}

// Where the ranks compare their models: where the parameters are, else where the group has a backend.
c10::Device exchangeDevice(c10d::ProcessGroup& group, const std::vector<NamedTensor>& trainable) {
  if (!trainable.empty() && !trainable[0].tensor.is_meta()) return trainable[0].tensor.device();
  const auto devices = group.getDeviceTypes();
  const bool onCpu = std::any_of(devices.begin(), devices.end(), [](c10::Device device) { return device.is_cpu(); });
  return onCpu || devices.empty() ? c10::Device(at::kCPU) : devices.front();
}

std::string joinNames(const std::vector<NamedTensor>& parameters, const std::vector<int>& indices) {
  std::string text;
  for (size_t i = 0; i < std::min(indices.size(), kMaxNames); ++i) {
    text += (i == 0 ? "'" : ", '") + parameters[indices[i]].name + "'";
  }
  if (indices.size() > kMaxNames) text += " and " + std::to_string(indices.size() - kMaxNames) + " more";
  return text;
}

// True inside a node of an outer backward, e.g. of a reentrant checkpoint.
bool insideBackwardNode() { return torch::autograd::get_current_node() != nullptr; }

}  // namespace

std::shared_ptr<GradReducer> GradReducer::create(c10::intrusive_ptr<c10d::ProcessGroup> group, const Model& model,
                                                 const ReducerOptions& options) {
  std::vector<NamedTensor> trainable = trainableOf(model);
  const int64_t bucketSize =
      options.bucketSize.value_or(std::max(kDefaultBucketSize, kDefaultBucketSizePerRank * group->getSize()));
  std::vector<Fact> facts = {{"bucket_size", std::to_string(bucketSize)},
                             {"unused_parameters", options.unused == UnusedParameters::kError ? "error" : "zero_fill"}};
  for (Fact& fact : factsOf(model)) facts.push_back(std::move(fact));
  checkAgreement(*group, exchangeDevice(*group, trainable), facts, refusalOf(trainable, options));
  broadcastModel(group, model);

  std::vector<ParameterSpec> specs;
  for (const auto& [name, tensor] : trainable) {
    const int type = static_cast<int>(tensor.scalar_type());
    specs.push_back({tensor.numel(), type, type});
  }
  Result<Layout> layout = layoutBuckets(specs, {.bucketSize = bucketSize, .worldSize = group->getSize()});
  TORCH_CHECK_VALUE(layout, "farandole.ddp: ", layout.status().toString());
  std::shared_ptr<GradReducer> reducer(
      new GradReducer(std::move(group), std::move(trainable), std::move(*layout), options.unused));
  reducer->attachHooks();
  return reducer;
}

GradReducer::GradReducer(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<NamedTensor> parameters,
                         Layout layout, UnusedParameters unused)
    : group_(std::move(group)),
      parameters_(std::move(parameters)),
      layout_(std::move(layout)),
      unused_(unused),
      ready_(parameters_.size(), 0) {
  const c10::Device device = parameters_[0].tensor.device();
  for (const BufferLayout& buffer : layout_.buffers) {
    buffers_.emplace_back(buffer.numel, at::TensorOptions(device).dtype(static_cast<at::ScalarType>(buffer.gradType)));
  }
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const Slot& slot = layout_.slots[p];
    mainGrads_.push_back(buffers_[slot.buffer].gradOf(parameters_[p].tensor, slot.offset));
  }
  for (const BucketLayout& bucket : layout_.buckets) {
    buckets_.emplace_back(buffers_[bucket.buffer].range(bucket.begin, bucket.end), bucket.parameters);
  }
}

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
    adoptGrad(parameter);
    markReady(parameter);
  }
}

void GradReducer::finishSync() {
  {
    std::lock_guard lock(mutex_);
    checkUsable();
  }
  finishRound(RoundEnd::kExplicit);
}

void GradReducer::abandon(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (!abandoned_.empty()) return;
    abandoned_ = why;
  }
  abandonGroup(*group_, why);
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
  TORCH_CHECK(abandoned_.empty(), "farandole.ddp: rank ", group_->getRank(),
              " of the group cannot average gradients any more: ", abandoned_);
}

void GradReducer::zeroGradBuffers() {
  std::lock_guard lock(mutex_);
  for (GradBuffer& buffer : buffers_) buffer.zero();
}

void GradReducer::onGradReady(int parameter, bool hasGradient) {
  const auto& [name, tensor] = parameters_[parameter];
  TORCH_CHECK(!at::GradMode::is_enabled(), "farandole.ddp: backward(create_graph=True) is not supported: parameter '",
              name, "' would get a gradient that is part of a graph");
  TORCH_CHECK(!hasGradient || tensor.grad().defined(), "farandole.ddp: the gradient of parameter '", name,
              "' was removed by a hook before it could be reduced");
  std::lock_guard lock(mutex_);
  if (!abandoned_.empty()) return;
  if (!requireSync_) {
    if (tensor.grad().defined()) adoptGrad(parameter);
    return;
  }
  queueBackwardEnd();
  inRound_ = true;
  TORCH_CHECK(!ready_[parameter], "farandole.ddp: parameter '", name,
              "' got its gradient twice in one backward that synchronizes: is it used by several reentrant "
              "checkpoints? Use checkpoint(..., use_reentrant=False)");
  adoptGrad(parameter);
  markReady(parameter);
}

void GradReducer::queueBackwardEnd() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == callbackTask_) return;
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->onBackwardEnd(); });
  callbackTask_ = task;
}

// Makes the view the parameter's gradient, with the value of the gradient that was there, or zero.
void GradReducer::adoptGrad(int parameter) {
  at::Tensor& grad = parameters_[parameter].tensor.mutable_grad();
  const at::Tensor& view = mainGrads_[parameter];
  if (grad.is_same(view)) return;
  if (!grad.defined()) {
    view.zero_();
  } else {
    const std::string& name = parameters_[parameter].name;
    TORCH_CHECK(grad.layout() == at::kStrided, "farandole.ddp: the gradient of parameter '", name,
                "' is sparse: expected a dense one (sparse=False in the embedding)");
    TORCH_CHECK(grad.sizes() == view.sizes(), "farandole.ddp: the gradient of parameter '", name, "' has the shape ",
                grad.sizes(), ": expected ", view.sizes(), ", the parameter's when it was wrapped");
    view.copy_(grad);
  }
  grad = view;
}

void GradReducer::markReady(int parameter) {
  ready_[parameter] = 1;
  ++readyCount_;
  buckets_[layout_.slots[parameter].bucket].markReady();
  issueReady();
}

void GradReducer::issueReady() {
  try {
    while (nextBucket_ < buckets_.size() && buckets_[nextBucket_].isReady()) buckets_[nextBucket_++].issue(*group_);
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
    if (!ready_[p]) unused.push_back(static_cast<int>(p));
  }
  for (int parameter : unused) {
    adoptGrad(parameter);
    markReady(parameter);
  }
  return unused;
}

void GradReducer::finishRound(RoundEnd end) {
  std::vector<int> unused;
  std::exception_ptr failure;
  try {
    {
      std::lock_guard lock(mutex_);
      if (!inRound_) return;
      unused = issueRest();
    }
    awaitBuckets();
  } catch (...) {
    failure = std::current_exception();
  }
  {
    std::lock_guard lock(mutex_);
    resetRound();
    synchronized_ = !failure;
  }
  if (failure) std::rethrow_exception(failure);
  throwUnused(unused, end);
}

// All are waited for, also after a failure: a reduction that is under way still writes into its bucket.
void GradReducer::awaitBuckets() {
  std::exception_ptr first;
  for (Bucket& bucket : buckets_) {
    try {
      bucket.wait(*group_);
    } catch (const std::exception&) {
      if (first == nullptr) first = std::current_exception();
    }
  }
  if (first == nullptr) return;
  try {
    std::rethrow_exception(first);
  } catch (const std::exception&) {
    std::lock_guard lock(mutex_);
    rethrowWithReason();
  }
}

void GradReducer::resetRound() {
  for (Bucket& bucket : buckets_) bucket.reset();
  std::fill(ready_.begin(), ready_.end(), 0);
  readyCount_ = 0;
  nextBucket_ = 0;
  inRound_ = false;
}

void GradReducer::rethrowWithReason() {
  if (abandoned_.empty()) abandoned_ = abandonmentOf(*group_);
  checkUsable();
  throw;
}

void GradReducer::throwUnused(const std::vector<int>& unused, RoundEnd end) const {
  TORCH_CHECK(
      end != RoundEnd::kAbandoned, "farandole.ddp: rank ", group_->getRank(),
      " of the group: a forward began before the last backward that synchronizes had ended (did it raise?). Without a "
      "gradient in it: ",
      unused.empty() ? "none" : joinNames(parameters_, unused),
      ". It was ended now, so that other ranks do not wait; its gradients are not to be used");
  if (unused.empty() || unused_ == UnusedParameters::kZeroFill) return;
  TORCH_CHECK(false, "farandole.ddp: rank ", group_->getRank(), " of the group: ", unused.size(), " of ",
              parameters_.size(),
              " parameters got no gradient in a backward that synchronizes: ", joinNames(parameters_, unused),
              ". They counted as zero, or as what had accumulated before, so that no other rank waits. Where this is "
              "meant, pass "
              "unused_parameters='zero_fill'");
}

}  // namespace farandole::ddp
