// How a GradReducer comes to be.

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "ddp/grad_reducer.h"

namespace farandole::ddp {
namespace {

// Where the ranks compare their models: whatever each brings, on the CPU where the group has a backend for it.
c10::Device exchangeDevice(c10d::ProcessGroup& group, const std::vector<ModelParameter>& trainable) {
  if (hasCpuBackend(group)) return at::kCPU;
  if (!trainable.empty() && !trainable[0].tensor.is_meta()) return trainable[0].tensor.device();
  const auto devices = group.getDeviceTypes();
  return devices.empty() ? c10::Device(at::kCPU) : devices.front();
}

// What the instance finds it tells the others, which would wait for it else.
void checkReplicas(const Replicas& replicas, const std::vector<ModelParameter>& trainable,
                   const std::vector<Fact>& facts, std::string refusal) {
  std::exception_ptr found;
  for (const Group& group : {replicas.group, replicas.instances}) {
    if (!group) continue;
    try {
      checkAgreement(*group, exchangeDevice(*group, trainable), facts, refusal);
    } catch (const c10::ValueError& error) {
      if (refusal.empty()) refusal = error.what_without_backtrace();
      if (!found) found = std::current_exception();
    }
  }
  if (found) std::rethrow_exception(found);
}

// By parameter: whether a rank that has used it tells the replicas of experts alone. Empty where none does.
std::vector<char> usesOf(const std::vector<ModelParameter>& parameters, const DataParallelGroups& groups,
                         UnusedParameters unused) {
  std::vector<char> isExpert;
  if (unused != UnusedParameters::kSkip) return isExpert;
  const bool areOthers = groups.experts.group != groups.dense.group;
  for (const ModelParameter& parameter : parameters) isExpert.push_back(areOthers && parameter.isExpert ? 1 : 0);
  return isExpert;
}

// What the policy needs and the groups have not; empty: nothing.
std::string refusalOf(UnusedParameters unused, const DataParallelGroups& groups) {
  const auto isMute = [](const Replicas& ranks) { return ranks.size() > 1 && !RoundReport::canTell(ranks); };
  if (unused != UnusedParameters::kSkip || (!isMute(groups.dense) && !isMute(groups.experts))) return "";
  return "unused_parameters='skip': expected a group with a backend for the CPU, too, where ranks tell what they used";
}

// Checks look at whole buckets.
Gradients::Home homeFor(const ReducerOptions& options, const BucketIssuer& issuer) {
  if (options.home != Gradients::Home::kGrad) return options.home;
  const bool stays = issuer.reducesInPlaces() && !options.checks.isEnabled();
  return stays ? Gradients::Home::kGrad : Gradients::Home::kBucketView;
}

}  // namespace

std::shared_ptr<GradReducer> GradReducer::create(const DataParallelGroups& groups, const Model& model,
                                                 const ReducerOptions& options, Gradients::IsAdded isAdded) {
  std::vector<Fact> facts = factsOf(options, groups);
  for (Fact& fact : ddp::factsOf(model)) facts.push_back(std::move(fact));
  std::string refusal = refusalOf(model, options.buffers);
  // Where rounds are ended from outside, the module may be one of several chunks of a model, of which some are frozen.
  if (refusal.empty() && options.endsWithBackward && trainableOf(model).empty()) {
    refusal = "the module has no parameter that requires a gradient";
  }
  if (refusal.empty()) refusal = refusalOf(options.unused, groups);
  if (refusal.empty() && options.broadcasts && groups.dense.size() > 1) refusal = refusalOfBroadcast(model);
  TORCH_CHECK_VALUE(!options.isAgreed || refusal.empty(), "farandole.ddp: ", refusal);
  if (!options.isAgreed) {
    checkReplicas(groups.dense, trainableOf(model), facts, std::move(refusal));
    if (options.broadcasts) broadcastModel(groups, model);
  }
  std::shared_ptr<GradReducer> reducer(new GradReducer(
      groups, std::make_shared<ModelBuffers>(model, groups, options.buffers), options, std::move(isAdded)));
  reducer->attachHooks();
  if (options.buffers.sharded) reducer->holdParameters();
  return reducer;
}

GradReducer::GradReducer(DataParallelGroups groups, std::shared_ptr<ModelBuffers> buffers,
                         const ReducerOptions& options, Gradients::IsAdded isAdded)
    : groups_(std::move(groups)),
      buffers_(std::move(buffers)),
      parameters_(buffers_->parameters()),
      options_(options),
      group_(*groups_.dense.group),
      issuer_(groups_, *buffers_, options),
      gradients_(buffers_, homeFor(options, issuer_), std::move(isAdded), issuer_.areAveraged()),
      streams_(buffers_->device()),
      expected_(parameters_.size(), 1),
      arrived_(parameters_.size(), 0),
      ready_(parameters_.size(), 0),
      touched_(parameters_.size(), 0),
      isGroupUsed_(issuer_.bucketGroups(), 0),
      unused_(options.unused),
      isCounting_(options.isGraphStatic),
      endsWithBackward_(options.endsWithBackward),
      report_(groups_, usesOf(parameters_, groups_, options.unused), issuer_.ordersExperts()) {}

void GradReducer::setGraphStatic(UnusedParameters unused) {
  std::lock_guard lock(mutex_);
  checkUsable();
  TORCH_CHECK(rounds_ == 0 && !inRound_,
              "farandole.ddp: static_graph after gradients were reduced: expected before the first backward");
  const std::string refusal = refusalOf(unused, groups_);
  TORCH_CHECK_VALUE(refusal.empty(), "farandole.ddp: ", refusal);
  if (unused != unused_) {
    report_ = RoundReport(groups_, usesOf(parameters_, groups_, unused), issuer_.ordersExperts());
  }
  unused_ = unused;
  isCounting_ = true;
}

void GradReducer::attachHooks() {
  hooks_.reserve(parameters_.size());
  for (size_t p = 0; p < parameters_.size(); ++p) {
    hooks_.emplace_back(parameters_[p].tensor,
                        [weak = weak_from_this(), parameter = static_cast<int>(p)](const at::Tensor& brought) {
                          if (auto self = weak.lock()) self->onGradReady(parameter, brought);
                        });
  }
}

}  // namespace farandole::ddp
