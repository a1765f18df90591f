#include "ddp/gradients.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace farandole::ddp {

Gradients::Gradients(std::shared_ptr<ModelBuffers> buffers, Home home, IsAdded isAdded)
    : buffers_(std::move(buffers)),
      home_(home),
      isAdded_(std::move(isAdded)),
      isForgotten_(buffers_->parameters().size(), 0) {}

void Gradients::accumulate(int parameter) {
  isReduced_ = isZero_ = false;
  home_ == Home::kGrad ? adopt(parameter) : add(parameter);
}

void Gradients::fill(int parameter, bool shown) {
  checkAccumulates(parameter);
  const at::Tensor& grad = buffers_->parameters()[parameter].tensor.grad();
  if (home_ == Home::kMainGrad) {
    add(parameter);
  } else if (shown || grad.defined()) {
    adopt(parameter);
  } else {
    buffers_->mainGrads()[parameter].zero_();
  }
}

void Gradients::show(int parameter) {
  if (home_ == Home::kGrad) buffers_->parameters()[parameter].tensor.mutable_grad() = buffers_->mainGrads()[parameter];
}

// Makes the view the parameter's gradient, with the value of the gradient that was there, or zero.
void Gradients::adopt(int parameter) {
  at::Tensor& grad = buffers_->parameters()[parameter].tensor.mutable_grad();
  const at::Tensor& view = buffers_->mainGrads()[parameter];
  if (grad.is_same(view)) return;
  if (grad.defined()) {
    checkFits(parameter, grad);
    view.copy_(grad);
  } else {
    view.zero_();
  }
  grad = view;
}

void Gradients::add(int parameter) {
  at::Tensor& grad = buffers_->parameters()[parameter].tensor.mutable_grad();
  const at::Tensor& mainGrad = buffers_->mainGrads()[parameter];
  const bool isForgotten = std::exchange(isForgotten_[parameter], 0) != 0;
  if (isAdded_ && isAdded_(parameter)) {
    TORCH_CHECK(!isForgotten, "farandole.ddp: parameter '", buffers_->parameters()[parameter].name,
                "' has grad_added_to_main_grad, but its main_grad was not zeroed: call zero_grad_buffer() before "
                "the step where kernels add to main_grad");
  } else if (grad.defined()) {
    checkFits(parameter, grad);
    isForgotten ? mainGrad.copy_(grad) : mainGrad.add_(grad);
  } else if (isForgotten) {
    mainGrad.zero_();
  }
  grad.reset();
}

void Gradients::zero() {
  buffers_->zeroGrads();
  std::fill(isForgotten_.begin(), isForgotten_.end(), 0);
  isReduced_ = false;
  isZero_ = true;
}

void Gradients::forget() {
  if (isZero_) return;
  std::fill(isForgotten_.begin(), isForgotten_.end(), 1);
  isReduced_ = false;
  for (const ModelParameter& parameter : buffers_->parameters()) parameter.tensor.mutable_grad().reset();
}

void Gradients::checkAccumulates(int parameter) const {
  TORCH_CHECK(!isReduced_ || !buffers_->isSharded(), "farandole.ddp: parameter '",
              buffers_->parameters()[parameter].name,
              "' gets a gradient while the gradients of the step before are still there, of which each rank has only "
              "its part: call zero_grad() of the optimizer, or zero_grad_buffer(), before backward");
}

void Gradients::checkFits(int parameter, const at::Tensor& grad) const {
  const auto& [name, tensor, isExpert, isShared] = buffers_->parameters()[parameter];
  TORCH_CHECK(grad.layout() == at::kStrided, "farandole.ddp: the gradient of parameter '", name,
              "' is sparse: expected a dense one (sparse=False in the embedding)");
  const at::Tensor& view = buffers_->mainGrads()[parameter];
  TORCH_CHECK(grad.sizes() == view.sizes(), "farandole.ddp: the gradient of parameter '", name, "' has the shape ",
              grad.sizes(), ": expected ", view.sizes(), ", the parameter's when it was wrapped");
}

}  // namespace farandole::ddp
