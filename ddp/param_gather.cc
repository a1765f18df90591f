#include "ddp/param_gather.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "ddp/abandonment.h"

namespace farandole::ddp {

ParamGather::ParamGather(const DataParallelGroups& groups, std::shared_ptr<ModelBuffers> buffers)
    : buffers_(std::move(buffers)), bucketGroupOf_(buffers_->parameters().size()) {
  const Layout& layout = buffers_->layout();
  for (const BucketGroupLayout& bucketGroup : buffers_->bucketGroups()) {
    const Group& group = bucketGroup.isExpert ? groups.experts.group : groups.dense.group;
    GroupState& state = states_.emplace_back();
    for (int bucket : bucketGroup.buckets) {
      const at::Tensor whole = buffers_->parametersOf(bucket);
      const int64_t numel = whole.numel() / group->getSize();
      at::AutoDispatchBelowADInplaceOrView untracked;
      if (numel > 0 && group->getSize() > 1) {
        state.gathers.push_back({whole, whole.narrow(0, group->getRank() * numel, numel), group, nullptr, bucket});
      }
      for (int parameter : layout.buckets[bucket].parameters) {
        bucketGroupOf_[parameter] = static_cast<int>(states_.size()) - 1;
      }
    }
  }
}

void ParamGather::markStale() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(isCurrent(), "farandole.ddp: parameters changed while those of the step before were still gathered");
  for (GroupState& state : states_) state.isStarted = state.isFinished = state.isOver = false;
  next_ = static_cast<int>(states_.size()) - 1;
  unfinished_ = static_cast<int>(states_.size());
}

void ParamGather::startNext() {
  GroupState& state = states_[next_];
  for (Gather& gather : state.gathers) {
    if (gather.work) continue;  // one after it has thrown before
    gather.timeline = timeline_;
    if (timeline_) gather.event = timeline_->begin(Timeline::Kind::kGather, gather.bucket);
    gather.work = allGather(*gather.group, gather.whole, gather.part);
    if (timeline_) timeline_->endWith(gather.event, gather.work, gather.whole.device().type());
  }
  state.isStarted = true;
  --next_;
}

void ParamGather::record(std::shared_ptr<Timeline> timeline) {
  std::lock_guard lock(mutex_);
  timeline_ = std::move(timeline);
}

void ParamGather::start() { startThrough(0); }

void ParamGather::startThrough(int bucketGroup) {
  std::lock_guard lock(mutex_);
  while (next_ >= bucketGroup) startNext();
}

bool ParamGather::finish(const std::vector<int>& bucketGroups) {
  if (isCurrent()) return false;
  bool isOutOfOrder = false;
  for (int bucketGroup : bucketGroups) {
    {
      std::lock_guard lock(mutex_);
      if (!mustWait(states_[bucketGroup])) continue;
      const bool isFirst = !states_[bucketGroup].isFinished;
      for (size_t later = bucketGroup + 1; isFirst && later < states_.size(); ++later) {
        isOutOfOrder = isOutOfOrder || !states_[later].isFinished;
      }
      while (!states_[bucketGroup].isStarted) startNext();
    }
    finishOne(bucketGroup);
  }
  return isOutOfOrder;
}

void ParamGather::finishAll() {
  start();
  for (int bucketGroup = static_cast<int>(states_.size()); bucketGroup-- > 0;) finish({bucketGroup});
  std::lock_guard lock(mutex_);
  for (GroupState& state : states_) {
    if (state.isFinished) end(state);
  }
}

// A wait on CUDA is one of the current stream alone.
bool ParamGather::mustWait(const GroupState& state) const {
  if (!state.isFinished) return true;
  return !state.isOver && std::find(state.behind.begin(), state.behind.end(), currentStream()) == state.behind.end();
}

void ParamGather::end(GroupState& state) {
  for (Gather& gather : state.gathers) gather.work.reset();
  state.behind.clear();
  if (!std::exchange(state.isOver, true)) --unfinished_;
}

c10::Stream ParamGather::currentStream() const {
  return c10::impl::VirtualGuardImpl(buffers_->device().type()).getStream(buffers_->device());
}

// Two threads may come for the same group: each waits for the work, and the first to be done marks it.
void ParamGather::finishOne(int bucketGroup) {
  std::vector<Gather> gathers;
  {
    std::lock_guard lock(mutex_);
    gathers = states_[bucketGroup].gathers;
  }
  for (Gather& gather : gathers) {
    if (!gather.work) continue;
    const std::size_t wait = gather.timeline ? gather.timeline->begin(Timeline::Kind::kGatherWait, gather.bucket) : 0;
    await(*gather.group, gather.whole.device().type(), *gather.work);
    if (!gather.timeline) continue;
    gather.timeline->end(wait);
    gather.timeline->see(gather.event);
  }
  std::lock_guard lock(mutex_);
  GroupState& state = states_[bucketGroup];
  state.isFinished = true;
  if (buffers_->device().is_cpu() || state.gathers.empty()) {
    end(state);
  } else if (!state.isOver) {
    state.behind.push_back(currentStream());
  }
}

}  // namespace farandole::ddp
