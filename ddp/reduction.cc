#include "ddp/reduction.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <cmath>
#include <utility>

namespace farandole::ddp {
namespace {

bool isShort(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

constexpr double kSameFactor = 1e-12;  // relative: what dividing twice may lose

}  // namespace

// Torch's own reducer scales, then sums. An average in the collective is the same bits where the number of ranks is a
// power of two (but for underflow), and spares a pass over the gradients.
Reduction::Reduction(Replicas replicas, c10::DeviceType device, const Options& options)
    : replicas_(std::move(replicas)),
      sharded_(options.sharded),
      // Gloo's is an all-reduce of a copy, whose work tells neither its end nor, while it waits, anything else: not
      // that it has failed, nor that the group was given up (await()).
      scatters_(sharded_ && !isGloo(*replicas_.group, device)),
      averageInCollective_(options.averageInCollective),
      accumulatesInFloat_(options.accumulatesInFloat && options.sharded),
      canAverage_(averages(*replicas_.group, device) &&
                  (!replicas_.instances || averages(*replicas_.instances, device))) {
  setScale(options.scale);
  const bool isWhole = !sharded_ && !replicas_.instances;
  if (replicas_.group->getSize() == 1) {
    reducesInPlaces_ = isWhole && device == c10::kCPU;
    return;
  }
  backend_ = replicas_.group->getBackend(device);
  auto* const gatherer = dynamic_cast<GatheredReductions*>(backend_.get());
  if (gatherer == nullptr || !gatherer->gathers(device)) return;
  gatherer_ = gatherer;
  accumulatesInFloat_ = accumulatesInFloat_ && !gatherer->roundsOnce();
  reducesInPlaces_ = isWhole && gatherer->reducesInPlaces(device);
}

void Reduction::setScale(double scale) {
  const double averaged = scale * replicas_.size();
  isAverage_ = std::abs(averaged - 1) < kSameFactor;
  const bool averagesItself = canAverage_ && isAverage_;
  op_ = c10d::ReduceOp::SUM;
  factor_ = scale;
  if (!averageInCollective_ && !averagesItself) return;
  op_ = c10d::ReduceOp::AVG;
  factor_ = averagesItself ? 1 : averaged;
}

at::Tensor Reduction::partOf(const at::Tensor& data) const {
  if (!sharded_) return data;
  const int64_t numel = data.numel() / replicas_.group->getSize();
  at::AutoDispatchBelowADInplaceOrView untracked;
  return data.narrow(0, replicas_.group->getRank() * numel, numel);
}

WorkPtr Reduction::startGroup(const Parts& parts, at::Tensor& data, Received& received) const {
  if (data.numel() == 0) return nullptr;
  if (parts.takeResult && !parts.tensors.empty()) return startInPlaces(parts.tensors);
  if (accumulatesInFloat_ && isShort(data.scalar_type()) && replicas_.group->getSize() > 1) {
    received = at::empty_like(data);
    return allToAll(*replicas_.group, received, data);
  }
  if (!parts.tensors.empty()) return startGroupFrom(parts.tensors, data);
  if (factor_ != 1) data.mul_(factor_);
  if (replicas_.group->getSize() == 1) return nullptr;
  if (!scatters_) return allReduce(*replicas_.group, data, op_);
  at::Tensor part = partOf(data);
  return reduceScatter(*replicas_.group, part, data, op_);
}

// Each rank's in turn, scaled at the end: of all that is rounded only the result.
void Reduction::finishGroup(Received& received, at::Tensor& part) const {
  const at::Tensor ours = std::exchange(received, at::Tensor());
  if (!ours.defined()) return;
  c10::NoGradGuard noGrad;
  const std::vector<at::Tensor> ranks = ours.chunk(replicas_.group->getSize());
  at::Tensor sum = ranks[0].to(at::kFloat);
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) sum.add_(ranks[rank]);
  // An average over instances is still to come where there are some.
  const double average = op_ == c10d::ReduceOp::AVG ? 1.0 / replicas_.group->getSize() : 1.0;
  part.copy_(sum.mul_(factor_ * average));
}

WorkPtr Reduction::startGroupFrom(const std::vector<at::Tensor>& inputs, at::Tensor& data) const {
  if (!sharded_) {
    c10d::AllreduceOptions options;
    options.reduceOp = op_;
    return gatherer_->allReduceFrom(inputs, data, options);
  }
  c10d::ReduceScatterOptions options;
  options.reduceOp = op_;
  at::Tensor part = partOf(data);
  return gatherer_->reduceScatterFrom(inputs, data, part, options);
}

WorkPtr Reduction::startInPlaces(const std::vector<at::Tensor>& parts) const {
  if (factor_ != 1) {
    for (const at::Tensor& part : parts) part.mul_(factor_);
  }
  if (replicas_.group->getSize() == 1) return nullptr;
  c10d::AllreduceOptions options;
  options.reduceOp = op_;
  return gatherer_->allReduceInPlaces(parts, options);
}

WorkPtr Reduction::startInstances(at::Tensor& part) const {
  if (!replicas_.instances || replicas_.instances->getSize() == 1 || part.numel() == 0) return nullptr;
  return allReduce(*replicas_.instances, part, op_);
}

}  // namespace farandole::ddp
