#include "ddp/grad_check.h"

#include <cmath>
#include <sstream>

namespace farandole::ddp {
namespace {

std::string troubleOf(double norm, const GradCheckOptions& options) {
  std::ostringstream text;
  if (options.nan && std::isnan(norm)) text << "is NaN somewhere";
  if (options.nan && std::isinf(norm)) text << "is infinite somewhere";
  if (options.largest > 0 && norm > options.largest && text.str().empty()) {
    text << "has a norm of " << norm << ", more than check_for_large_grads=" << options.largest;
  }
  return text.str();
}

}  // namespace

std::string troubleIn(const ModelBuffers& buffers, int bucket, const GradCheckOptions& options) {
  // In double: the norm of what is finite must not overflow.
  const auto normOf = [](const at::Tensor& grad) {
    return at::linalg_vector_norm(grad, 2, {}, false, grad.is_complex() ? at::kComplexDouble : at::kDouble);
  };
  const auto whole = normOf(buffers.gradsOf(bucket)).item<double>();
  // What is not finite hides others that are too large.
  if (std::isfinite(whole) && troubleOf(whole, options).empty()) return "";
  for (int parameter : buffers.layout().buckets[bucket].parameters) {
    const at::Tensor& grad = buffers.mainGrads()[parameter];
    if (grad.numel() == 0) continue;
    const std::string trouble = troubleOf(normOf(grad).item<double>(), options);
    if (!trouble.empty()) {
      return "the gradient of parameter '" + buffers.parameters()[parameter].name + "' (bucket " +
             std::to_string(bucket) + ") " + trouble;
    }
  }
  return "";
}

}  // namespace farandole::ddp
