#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "ddp/bucket.h"
#include "ddp/bucket_layout.h"
#include "ddp/grad_buffer.h"
#include "ddp/model_agreement.h"
#include "ddp/ready_hook.h"

namespace farandole::ddp {

// What to do when a parameter gets no gradient in a backward that synchronizes.
// Either way its bucket is reduced with what it holds (zeros, or what no_sync
// accumulated), so that no rank waits for ever and all have the same gradients.
enum class UnusedParameters {
  kError,  // then throw on the rank where it happened, naming them
  kZeroFill,
};

struct ReducerOptions {
  std::optional<int64_t> bucketSize;  // elements; by default max(40e6, 1e6 * group size), as Megatron-core's
  UnusedParameters unused = UnusedParameters::kError;
};

// Averages the gradients of one model over a process group, bucket by bucket,
// while backward still runs.
//
// A round is one synchronizing backward: it starts with the first gradient;
// buckets are issued in index order, each once all of its gradients are there and
// all before it are issued; it ends in a callback at the end of the backward,
// which waits. While a backward does not synchronize, gradients only accumulate.
// Every accumulated gradient is moved into the buffers and `.grad` made a view
// of them.
//
// Threads: methods and hooks may be called from any thread, without the GIL; one
// backward at a time. Waiting holds no lock. Lifetime: hooks hold the reducer
// weakly, a running backward holds it.
class GradReducer : public std::enable_shared_from_this<GradReducer> {
 public:
  // A collective: checks that all ranks bring the same model and options, then
  // overwrites the model with that of rank 0.
  static std::shared_ptr<GradReducer> create(c10::intrusive_ptr<c10d::ProcessGroup> group, const Model& model,
                                             const ReducerOptions& options);

  GradReducer(const GradReducer&) = delete;
  GradReducer& operator=(const GradReducer&) = delete;

  // Whether gradients that become ready from now on are reduced.
  void setRequireSync(bool requireSync);

  // To be called before a forward that will be differentiated. Throws when the
  // round before was left unfinished (a backward that raised), after ending it,
  // so that other ranks do not wait and the next forward works.
  void prepareForward(bool requireSync);

  // A round without hooks, e.g. after several backwards that did not synchronize:
  // issues all buckets with what they hold; finishSync waits, and does nothing
  // when no round is open.
  void startSync();
  void finishSync();

  // For a rank that failed and will not call what the others call: gives the group
  // up (abandonment.h). `why` names this rank. Then, as on every rank that has
  // learned of it, all but this method throws, and gradients are left alone: the
  // parameters may be given to another reducer.
  void abandon(const std::string& why);

  // Whether a round has ended since the last beginStep() or setRequireSync(false):
  // a rank that fails after that is not waited for.
  void beginStep();
  bool isSynchronized();

  void zeroGradBuffers();

  const Layout& layout() const { return layout_; }
  const std::vector<NamedTensor>& parameters() const { return parameters_; }  // the trainable ones
  const std::vector<at::Tensor>& mainGrads() const { return mainGrads_; }     // by parameter

 private:
  enum class RoundEnd { kBackward, kExplicit, kAbandoned };

  GradReducer(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<NamedTensor> parameters, Layout layout,
              UnusedParameters unused);
  void attachHooks();

  void onGradReady(int parameter, bool hasGradient);
  void onBackwardEnd();
  void finishRound(RoundEnd end);
  void awaitBuckets();

  // With mutex_ held:
  void adoptGrad(int parameter);
  void queueBackwardEnd();
  void markReady(int parameter);
  std::vector<int> issueRest();
  void issueReady();
  void resetRound();
  void checkUsable() const;
  // Inside a catch block: throws why the group was abandoned if it was, else what was caught.
  [[noreturn]] void rethrowWithReason();

  void throwUnused(const std::vector<int>& unused, RoundEnd end) const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::vector<NamedTensor> parameters_;
  const Layout layout_;
  const UnusedParameters unused_;
  std::vector<GradBuffer> buffers_;
  std::vector<at::Tensor> mainGrads_;
  std::vector<ReadyHook> hooks_;

  std::mutex mutex_;  // guards all below
  bool requireSync_ = true;
  std::vector<Bucket> buckets_;
  std::vector<char> ready_;  // by parameter, in this round
  size_t readyCount_ = 0;
  size_t nextBucket_ = 0;  // the first that is not issued
  bool inRound_ = false;
  bool synchronized_ = false;
  std::string abandoned_;  // why, once this rank knows
  int callbackTask_ = -1;  // id of the graph task that has our callback
};

}  // namespace farandole::ddp
