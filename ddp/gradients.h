#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/model_buffers.h"

namespace farandole::ddp {

// How gradients come from autograd to where they are reduced, and what `.grad` is after.
// Not synchronized: its GradReducer is.
class Gradients {
 public:
  enum class Home {
    kGrad,        // `.grad`: large ones stay where autograd has computed them
    kBucketView,  // `.grad`, a view of the buffer, as in torch's DDP with gradient_as_bucket_view
    kMainGrad,  // the gradient is added to main_grad, whatever its type, and `.grad` is left empty, as in Megatron-core
  };

  // Whether a kernel has added a parameter's gradient to main_grad already, so that `.grad` must not be added:
  // Megatron's grad_added_to_main_grad and zero_out_wgrad.
  using IsAdded = std::function<bool(int parameter)>;

  // `areAveraged`: by parameter, whether what is reduced may be reduced once more, which leaves it what it is.
  Gradients(std::shared_ptr<ModelBuffers> buffers, Home home, IsAdded isAdded, std::vector<char> areAveraged);

  Home home() const { return home_; }
  // kGrad becomes kBucketView.
  void moveIntoBuffers();
  // All are in the buffers until autograd comes with the next ones: with what they hold, or whatever is there.
  void returnAll(bool withValues = true);

  // Why what was reduced cannot be added to and reduced again; empty where it can, or where nothing is left of it.
  // `brought`: what autograd has come with, if it has.
  std::string troubleWithMore(int parameter, const at::Tensor& brought = {}) const;
  // So for what autograd has come with, which is added all the same: the trouble stays until a round or a reset.
  std::string addTo(int parameter, const at::Tensor& brought);
  // The trouble that has stayed with this parameter, or, of all, with the first one.
  std::string overrunOf(int parameter) const;
  std::string overrun() const;
  // Of one for the same parameters, whose gradients these have now.
  void follow(const Gradients& other) { held_ = other.held_; }

  // Takes what autograd has accumulated. Returns why it cannot be taken, naming the parameter, or nothing: what cannot
  // is dropped, and counts as zero, so that other ranks do not wait for this one.
  // With `brought`, what autograd came with and is done with, a large gradient that would be copied stays where it is,
  // unless others have its memory, too: for ever with kGrad, else until takeParts().
  [[nodiscard]] std::string accumulate(int parameter, const at::Tensor& brought = {});

  // Whether a kernel has added the gradient to main_grad, so that autograd has none.
  bool isAddedByKernel(int parameter) const { return isAdded_ && isAdded_(parameter); }

  // Whether `.grad` is another tensor than the reducer's: somebody has put it there.
  bool isReplaced(int parameter) const;

  // What autograd came with too late: it would be there with the next gradient.
  void drop(int parameter);

  // Where the gradients of a bucket are.
  Parts takeParts(int bucket);
  void dropBorrowed();

  // For one that has got no gradient: what it holds counts, or zero. Where it is not `shown`, `.grad` stays empty.
  // Returns as accumulate().
  [[nodiscard]] std::string fill(int parameter, bool shown);
  void show(int parameter);

  // Where `.grad` has been emptied, what was in its place is free for the first forward of a step.
  void release();

  // The buffers hold zero, and whatever adds to main_grad may do so.
  void zero();

  // What the buffers hold does not count any more: the next gradient of each parameter replaces it, without a pass
  // over the buffers. With Home::kGrad `.grad` is emptied. Nothing where they hold zero.
  void forget();

  // So those of some parameters, whoever has the others; or what they hold is zero, `.grad` too. isReduced() stays.
  void forgetSome(const std::vector<int>& parameters, bool zeroes);

  // What the buffers hold is reduced and, where sharded, no longer a sum that could be added to.
  void markReduced();
  bool isReduced() const { return isReduced_; }

 private:
  enum class Held : char {
    kSum,      // nothing, or what may be added to
    kReduced,  // what may not
    kOverrun,  // that, and it was added to
  };

  void adopt(int parameter, const at::Tensor& brought = {});
  void add(int parameter, const at::Tensor& brought = {});
  bool isMainGrad(int parameter) const;
  bool holdsReduced(int parameter, const at::Tensor& brought) const;
  void zeroMainGrad(int parameter);
  void remakeMainGrad(int parameter);
  void copyOrLeave(int parameter, const at::Tensor& grad, const at::Tensor& brought);
  std::string dropUnfit(int parameter);
  bool fits(int parameter, const at::Tensor& grad) const;
  std::string misfitOf(int parameter, const at::Tensor& grad) const;

  const std::shared_ptr<ModelBuffers> buffers_;
  Home home_;
  const IsAdded isAdded_;
  const std::vector<char> areAveraged_;
  std::vector<char> isForgotten_;     // by parameter: what main_grad holds does not count
  std::vector<Held> held_;            // by parameter: what it has
  std::vector<at::Tensor> borrowed_;  // by parameter: what is reduced from where it is, while it is not main_grad
  bool isReduced_ = false;
  bool isZero_ = false;
};

}  // namespace farandole::ddp
