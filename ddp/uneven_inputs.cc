// What a GradReducer does where ranks have unequal numbers of rounds.

#include <c10/core/GradMode.h>

#include <exception>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "ddp/grad_reducer.h"

namespace farandole::ddp {

void GradReducer::averageOver(int replicas) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!inRound_, "farandole.ddp: the number of replicas changes while gradients are reduced");
  if (options_.isAveraged) issuer_.setScale(1.0 / replicas);
}

void GradReducer::shadowRound() {
  std::vector<int> unused(parameters_.size());
  std::iota(unused.begin(), unused.end(), 0);
  std::vector<at::Tensor> own;
  std::string trouble;
  std::exception_ptr failure;
  {
    std::lock_guard lock(mutex_);
    checkUsable();
    TORCH_CHECK(!inRound_, "farandole.ddp: this rank has left a synchronization of its own open");
    inRound_ = true;
  }
  try {
    std::exception_ptr issued;
    {
      std::lock_guard lock(mutex_);
      c10::NoGradGuard noGrad;
      gradients_.returnAll();
      for (size_t bucket = 0; bucket < buffers_->layout().buckets.size(); ++bucket) {
        own.push_back(buffers_->gradsOf(static_cast<int>(bucket)).clone());
      }
      buffers_->zeroGrads();
      for (int parameter : unused) markReady(parameter);
      issued = issueReady();
    }
    if (issued) throwWithReason(issued);
    trouble = awaitRound(unused, "", std::nullopt);
  } catch (...) {
    failure = std::current_exception();
  }
  std::lock_guard lock(mutex_);
  c10::NoGradGuard noGrad;
  for (size_t bucket = 0; bucket < own.size(); ++bucket) {
    buffers_->gradsOf(static_cast<int>(bucket)).copy_(own[bucket]);
  }
  if (inRound_) clearRound();
  if (failure) std::rethrow_exception(failure);
  TORCH_CHECK(trouble.empty(), "farandole.ddp: ", trouble);
}

}  // namespace farandole::ddp
