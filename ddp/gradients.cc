#include "ddp/gradients.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace farandole::ddp {
namespace {

// Less is copied faster, with the cache that it is in, than it is looked after.
constexpr int64_t kBorrowedBytes = 16 << 10;

// Whether nobody else has the memory of `.grad`: functions may work in place on a gradient that they share with it.
// Autograd detached it from what it brought, which may be a view, as the gradient of a Linear's weight is (of the
// transposed one). Nobody but such a view has its base.
bool isUnshared(const at::Tensor& grad, const at::Tensor& brought) {
  if (!brought.has_storage() || !brought.is_alias_of(grad)) return grad.storage().use_count() == 1;
  std::size_t owners = 2;
  if (brought.is_view()) {
    const auto& base = brought._base();
    constexpr std::size_t kView = 1;
    if (base.use_count() == kView) ++owners;
  }
  return grad.storage().use_count() == owners;
}

}  // namespace

Gradients::Gradients(std::shared_ptr<ModelBuffers> buffers, Home home, IsAdded isAdded, std::vector<char> areAveraged)
    : buffers_(std::move(buffers)),
      home_(home),
      isAdded_(std::move(isAdded)),
      areAveraged_(std::move(areAveraged)),
      isForgotten_(buffers_->parameters().size(), 0),
      held_(buffers_->parameters().size(), Held::kSum),
      borrowed_(buffers_->parameters().size()) {}

std::string Gradients::accumulate(int parameter, const at::Tensor& brought) {
  isReduced_ = isZero_ = false;
  std::string trouble = dropUnfit(parameter);
  remakeMainGrad(parameter);
  home_ == Home::kMainGrad ? add(parameter, brought) : adopt(parameter, brought);
  return trouble;
}

void Gradients::moveIntoBuffers() {
  if (home_ != Home::kGrad) return;
  home_ = Home::kBucketView;
  returnAll();
}

void Gradients::returnAll(bool withValues) {
  for (size_t p = 0; p < buffers_->parameters().size(); ++p) {
    const int parameter = static_cast<int>(p);
    if (!buffers_->hasMoved(parameter)) continue;
    const bool isShown = isMainGrad(parameter);
    withValues ? buffers_->returnGrad(parameter) : buffers_->forgetMoved(parameter);
    if (isShown) show(parameter);
  }
}

// Whether `.grad` is main_grad, or has its memory.
bool Gradients::isMainGrad(int parameter) const {
  const at::Tensor& grad = buffers_->parameters()[parameter].tensor.grad();
  const at::Tensor& view = buffers_->mainGrads()[parameter];
  if (grad.is_same(view)) return true;
  // A sparse one has no storage: it does not fit.
  return grad.defined() && grad.has_storage() && grad.is_alias_of(view) &&
         grad.storage_offset() == view.storage_offset() && grad.sizes() == view.sizes() &&
         grad.strides() == view.strides();
}

bool Gradients::isReplaced(int parameter) const {
  return buffers_->parameters()[parameter].tensor.grad().defined() && !isMainGrad(parameter);
}

void Gradients::drop(int parameter) {
  if (home_ == Home::kMainGrad) buffers_->parameters()[parameter].tensor.mutable_grad().reset();
}

// Parts hold on to their memory: `.grad` may get another one while they are reduced.
Parts Gradients::takeParts(int bucket) {
  const bool stays = home_ == Home::kGrad;
  const std::vector<int>& parameters = buffers_->layout().buckets[bucket].parameters;
  for (int parameter : parameters) remakeMainGrad(parameter);
  if (stays) {
    at::AutoDispatchBelowADInplaceOrView untracked;
    for (int parameter : parameters) {
      if (buffers_->isElsewhere(parameter)) borrowed_[parameter] = at::alias(buffers_->mainGrads()[parameter]);
    }
  }
  Parts parts{buffers_->partsOf(bucket, borrowed_), stays};
  for (int parameter : parameters) borrowed_[parameter].reset();
  return parts;
}

void Gradients::dropBorrowed() {
  for (at::Tensor& grad : borrowed_) grad.reset();
}

void Gradients::copyOrLeave(int parameter, const at::Tensor& grad, const at::Tensor& brought) {
  const at::Tensor& view = buffers_->mainGrads()[parameter];
  const bool isAlike = grad.scalar_type() == view.scalar_type() && grad.strides() == view.strides() &&
                       grad.is_non_overlapping_and_dense() && !grad.is_complex() && !grad.is_neg() &&
                       !grad._is_zerotensor();
  const bool isLarge = static_cast<int64_t>(grad.nbytes()) >= kBorrowedBytes;
  const bool canLeave = brought.defined() && isLarge && isAlike && isUnshared(grad, brought);
  if (home_ == Home::kGrad && canLeave && grad.storage().nbytes() == grad.nbytes()) {
    buffers_->moveGrad(parameter, grad);
  } else if (home_ != Home::kGrad && canLeave) {
    borrowed_[parameter] = grad;
  } else {
    buffers_->forgetMoved(parameter);
    view.copy_(grad);
  }
}

std::string Gradients::fill(int parameter, bool shown) {
  std::string trouble = dropUnfit(parameter);
  remakeMainGrad(parameter);
  const at::Tensor& grad = buffers_->parameters()[parameter].tensor.grad();
  if (home_ == Home::kMainGrad) {
    add(parameter);
  } else if (shown || grad.defined()) {
    adopt(parameter);
  } else {
    zeroMainGrad(parameter);
  }
  return trouble;
}

// What the user may still have of the step before stays as it is.
void Gradients::zeroMainGrad(int parameter) {
  buffers_->forgetMoved(parameter);
  buffers_->mainGrads()[parameter].zero_();
}

// With its values. What it has become would be written to as what it was.
void Gradients::remakeMainGrad(int parameter) {
  if (!buffers_->isAsMade(parameter)) buffers_->returnGrad(parameter);
}

void Gradients::show(int parameter) {
  if (home_ == Home::kMainGrad) return;
  buffers_->parameters()[parameter].tensor.mutable_grad() = buffers_->mainGrads()[parameter];
}

// Makes main_grad the parameter's gradient, with the value of the gradient that was there, or zero; or moves it there.
void Gradients::adopt(int parameter, const at::Tensor& brought) {
  if (isMainGrad(parameter)) return;
  at::Tensor& grad = buffers_->parameters()[parameter].tensor.mutable_grad();
  if (grad.defined()) {
    copyOrLeave(parameter, grad, brought);
  } else {
    zeroMainGrad(parameter);
  }
  if (!buffers_->hasMoved(parameter)) grad = buffers_->mainGrads()[parameter];
}

void Gradients::add(int parameter, const at::Tensor& brought) {
  at::Tensor& grad = buffers_->parameters()[parameter].tensor.mutable_grad();
  const at::Tensor& mainGrad = buffers_->mainGrads()[parameter];
  const bool isForgotten = std::exchange(isForgotten_[parameter], 0) != 0;
  if (isAddedByKernel(parameter)) {
    // It is there.
  } else if (grad.defined()) {
    if (isForgotten) {
      copyOrLeave(parameter, grad, brought);
    } else if (at::isFloat8Type(grad.scalar_type())) {  // which torch adds to no other type
      mainGrad.add_(grad.to(mainGrad.scalar_type()));
    } else {
      mainGrad.add_(grad);
    }
  } else if (isForgotten) {
    mainGrad.zero_();
  }
  grad.reset();
}

void Gradients::release() {
  if (home_ != Home::kGrad) return;
  for (size_t p = 0; p < buffers_->parameters().size(); ++p) {
    const int parameter = static_cast<int>(p);
    const bool isEmptied = !buffers_->parameters()[p].tensor.grad().defined();
    if (isEmptied) buffers_->forgetMoved(parameter);
  }
}

void Gradients::zero() {
  returnAll(false);
  buffers_->zeroGrads();
  std::fill(isForgotten_.begin(), isForgotten_.end(), 0);
  std::fill(held_.begin(), held_.end(), Held::kSum);
  isReduced_ = false;
  isZero_ = true;
}

void Gradients::forget() {
  if (isZero_) return;
  std::fill(isForgotten_.begin(), isForgotten_.end(), 1);
  std::fill(held_.begin(), held_.end(), Held::kSum);
  isReduced_ = false;
  for (const ModelParameter& parameter : buffers_->parameters()) parameter.tensor.mutable_grad().reset();
}

void Gradients::forgetSome(const std::vector<int>& parameters, bool zeroes) {
  c10::NoGradGuard noGrad;
  isZero_ = isZero_ && zeroes;
  for (int parameter : parameters) {
    held_[parameter] = Held::kSum;
    at::Tensor& grad = buffers_->parameters()[parameter].tensor.mutable_grad();
    if (!zeroes || home_ == Home::kMainGrad) {
      grad.reset();
    } else if (grad.defined()) {
      grad.zero_();
    }
    isForgotten_[parameter] = zeroes ? 0 : 1;
    if (zeroes && home_ == Home::kMainGrad) zeroMainGrad(parameter);
  }
}

void Gradients::markReduced() {
  isReduced_ = true;
  isZero_ = false;
  for (size_t p = 0; p < held_.size(); ++p) {
    held_[p] = buffers_->isSharded() || areAveraged_[p] == 0 ? Held::kReduced : Held::kSum;
  }
}

// An average that every rank has may be added to, as with torch's DDP: averaged once more it stays.
std::string Gradients::troubleWithMore(int parameter, const at::Tensor& brought) const {
  if (held_[parameter] == Held::kSum) return "";
  if (!buffers_->isSharded() && !holdsReduced(parameter, brought)) return "";
  return "parameter '" + buffers_->parameters()[parameter].name +
         "' gets a gradient while the gradients of the step before are still there, " +
         (buffers_->isSharded() ? "of which each rank has only its part"
                                : "which would be summed over the ranks once more") +
         ": call zero_grad() of the optimizer, or zero_grad_buffer(), before backward, or put all backwards of a "
         "step but the last in no_sync()";
}

std::string Gradients::addTo(int parameter, const at::Tensor& brought) {
  std::string trouble = troubleWithMore(parameter, brought);
  held_[parameter] = trouble.empty() ? Held::kSum : Held::kOverrun;
  if (!trouble.empty()) isReduced_ = false;  // also where a kernel has added it
  return trouble;
}

std::string Gradients::overrunOf(int parameter) const {
  return held_[parameter] == Held::kOverrun ? troubleWithMore(parameter) : "";
}

std::string Gradients::overrun() const {
  for (size_t p = 0; p < held_.size(); ++p) {
    std::string trouble = overrunOf(static_cast<int>(p));
    if (!trouble.empty()) return trouble;
  }
  return "";
}

// Gradients are zeroed and emptied without telling.
bool Gradients::holdsReduced(int parameter, const at::Tensor& brought) const {
  const at::Tensor& view = buffers_->mainGrads()[parameter];
  if (home_ == Home::kMainGrad) return isAddedByKernel(parameter) || view.count_nonzero().item<int64_t>() > 0;
  if (!isMainGrad(parameter)) return false;
  if (!brought.defined()) return view.count_nonzero().item<int64_t>() > 0;
  return brought.layout() == at::kStrided && !view.equal(brought);  // autograd has added it
}

std::string Gradients::dropUnfit(int parameter) {
  const at::Tensor& mainGrad = buffers_->mainGrads()[parameter];
  at::Tensor& grad = buffers_->parameters()[parameter].tensor.mutable_grad();
  const bool isAsMade = fits(parameter, mainGrad);
  if (!isAsMade || (grad.defined() && !fits(parameter, grad))) {
    std::string trouble = misfitOf(parameter, isAsMade ? grad : mainGrad);
    if (!isAsMade) buffers_->forgetMoved(parameter);
    grad.reset();
    return trouble;
  }
  if (isForgotten_[parameter] == 0 || !isAddedByKernel(parameter)) return "";
  return "parameter '" + buffers_->parameters()[parameter].name +
         "' has grad_added_to_main_grad, but its main_grad was not zeroed: call zero_grad_buffer() before the step "
         "where kernels add to main_grad";
}

bool Gradients::fits(int parameter, const at::Tensor& grad) const {
  return grad.layout() == at::kStrided && grad.sizes() == buffers_->shapeOf(parameter);
}

std::string Gradients::misfitOf(int parameter, const at::Tensor& grad) const {
  const std::string what = "the gradient of parameter '" + buffers_->parameters()[parameter].name + "' ";
  if (grad.layout() != at::kStrided) return what + "is sparse: expected a dense one (sparse=False in the embedding)";
  return what + c10::str("has the shape ", grad.sizes(), ": expected ", buffers_->shapeOf(parameter),
                         ", the parameter's when it was wrapped");
}

}  // namespace farandole::ddp
