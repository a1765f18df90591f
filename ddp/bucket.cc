#include "ddp/bucket.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "ddp/abandonment.h"

namespace farandole::ddp {
namespace {

// Collectives know no complex numbers.
at::Tensor asReal(const at::Tensor& data) {
  if (!data.is_complex()) return data;
  at::AutoDispatchBelowADInplaceOrView untracked;
  return at::view_as_real(data).view(-1);
}

}  // namespace

Bucket::Bucket(const at::Tensor& data, std::shared_ptr<const Reduction> reduction)
    : data_(asReal(data)), part_(reduction->partOf(data_)), reduction_(std::move(reduction)) {}

void Bucket::setHook(std::shared_ptr<CommHook> hook, int index) {
  hook_ = std::move(hook);
  index_ = index;
}

void Bucket::issue(Parts parts) {
  if (hook_) {
    future_ = hook_->run(index_);
    return;
  }
  step_ = Step::kGroup;
  parts_ = std::move(parts);
  work_ = reduction_->startGroup(parts_, data_, received_);
}

bool Bucket::releaseParts() {
  if (parts_.tensors.empty() && !received_.defined()) return true;
  // A failure is left for wait().
  if (work_ && (!work_->isCompleted() || work_->exception() != nullptr)) return false;
  if (received_.defined()) awaitGroup();
  work_.reset();  // it holds them, too
  parts_.tensors.clear();
  return true;
}

bool Bucket::advance(bool wait) {
  if (step_ != Step::kGroup) return true;
  if (work_ && reduction_->replicas().instances) {
    // A wait on CUDA blocks the current stream only, and is what orders the two steps.
    if (!wait && data_.is_cpu() && !work_->isCompleted()) return false;
    awaitGroup();
  }
  step_ = Step::kInstances;
  if (WorkPtr next = reduction_->startInstances(part_)) work_ = std::move(next);
  return true;
}

void Bucket::wait() {
  if (const CommHook::Future ours = std::exchange(future_, nullptr)) hook_->finish(index_, *ours);
  const bool isGroup = step_ == Step::kGroup || !reduction_->replicas().instances;
  step_ = Step::kIdle;
  if (isGroup) {
    awaitGroup();
  } else {
    await(work_, reduction_->replicas().instances);
  }
  parts_.tensors.clear();
}

void Bucket::awaitGroup() {
  await(work_, reduction_->replicas().group);
  reduction_->finishGroup(received_, part_);
}

void Bucket::await(WorkPtr& work, const Group& group) {
  if (WorkPtr ours = std::exchange(work, nullptr)) ddp::await(*group, data_.device().type(), *ours);
}

void Bucket::reset() {
  step_ = Step::kIdle;
  work_.reset();
  received_.reset();
  future_.reset();
  parts_.tensors.clear();
}

}  // namespace farandole::ddp
