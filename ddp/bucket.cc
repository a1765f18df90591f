#include "ddp/bucket.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "ddp/abandonment.h"

namespace farandole::ddp {
namespace {

// Collectives know no complex numbers.
at::Tensor asReal(at::Tensor data) {
  if (!data.is_complex()) return data;
  at::AutoDispatchBelowADInplaceOrView untracked;
  return at::view_as_real(data).view(-1);
}

}  // namespace

Bucket::Bucket(at::Tensor data, std::vector<int> parameters)
    : data_(asReal(std::move(data))), parameters_(std::move(parameters)), pending_(parameters_.size()) {}

void Bucket::issue(c10d::ProcessGroup& group) {
  const int size = group.getSize();
  if (size == 1 || data_.numel() == 0) return;
  data_.mul_(1.0 / size);
  std::vector<at::Tensor> tensors = {data_};
  work_ = group.allreduce(tensors);
}

void Bucket::wait(c10d::ProcessGroup& group) {
  if (auto work = std::exchange(work_, nullptr)) await(group, data_.device().type(), *work);
}

void Bucket::reset() {
  pending_ = parameters_.size();
  work_.reset();
}

}  // namespace farandole::ddp
