#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ddp/bucket_issuer.h"
#include "ddp/gradients.h"
#include "ddp/model_agreement.h"
#include "ddp/model_buffers.h"
#include "ddp/ready_hook.h"
#include "ddp/reducer_options.h"
#include "ddp/round_report.h"
#include "ddp/timeline.h"

namespace farandole::ddp {

// Averages the gradients of one model over its replicas, bucket by bucket, while
// backward still runs.
//
// A round is one synchronizing backward: it starts with the first gradient;
// groups of buckets are issued in an order that all ranks share, each once all of
// its gradients are there and all before it are issued. It ends in a callback at
// the end of the backward, which waits, or in finishSync(). While a backward does
// not synchronize, gradients only accumulate.
//
// The order is by index in the first round, which is that of reverse registration;
// after it, that in which groups became ready on rank 0.
//
// Threads: methods and hooks may be called from any thread, without the GIL; one
// backward at a time. Waiting holds no lock. Lifetime: hooks hold the reducer
// weakly, a running backward holds it.
class GradReducer : public std::enable_shared_from_this<GradReducer> {
 public:
  // A collective: checks that all ranks bring the same model and options, then
  // overwrites the model with that of rank 0.
  static std::shared_ptr<GradReducer> create(const DataParallelGroups& groups, const Model& model,
                                             const ReducerOptions& options, Gradients::IsAdded isAdded = {});

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
  // when no round is open. Where rounds do not end with backward, finishSync makes
  // the round if need be, once until gradients are zeroed or forgotten.
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

  // As Gradients'.
  void zeroGrads();
  void forgetGrads();
  void scaleGrads(double factor);

  // Whether what the buffers hold is the result of a round.
  bool isReduced();

  // What happens is recorded there, from the next round on, if one is open; null: nowhere.
  void record(std::shared_ptr<Timeline> timeline);
  bool isInRound();
  int rounds();  // that have ended: the same number on all ranks

  const ReducerOptions& options() const { return options_; }

  const std::shared_ptr<ModelBuffers>& buffers() const { return buffers_; }
  const DataParallelGroups& groups() const { return groups_; }

 private:
  enum class RoundEnd { kBackward, kExplicit, kAbandoned };

  GradReducer(DataParallelGroups groups, std::shared_ptr<ModelBuffers> buffers, const ReducerOptions& options,
              Gradients::IsAdded isAdded);
  void attachHooks();

  void onGradReady(int parameter, bool hasGradient);
  void onBackwardEnd();
  void finishRound(RoundEnd end);
  // What is wrong on any rank; `trouble` is this one's.
  std::string awaitRound(const std::vector<int>& unused, const std::string& trouble);

  // With mutex_ held:
  void queueBackwardEnd();
  void markReady(int parameter);
  std::vector<int> issueRest();
  void issueReady();
  void resetRound();
  void takeTimeline();
  void checkUsable() const;
  std::string troubleOf(const std::vector<int>& unused, RoundEnd end) const;
  // Inside a catch block: throws why the group was abandoned if it was, else what was caught.
  [[noreturn]] void rethrowWithReason();

  const DataParallelGroups groups_;
  const std::shared_ptr<ModelBuffers> buffers_;
  const std::vector<ModelParameter>& parameters_;  // the buffers'
  const ReducerOptions options_;
  c10d::ProcessGroup& group_;  // the dense one
  std::vector<ReadyHook> hooks_;

  std::mutex mutex_;  // guards all below
  Gradients gradients_;
  BucketIssuer issuer_;
  bool requireSync_ = true;
  bool isOrderLearned_ = false;
  std::vector<int> expected_;  // by parameter: gradients in a round
  std::vector<int> arrived_;
  std::vector<char> ready_;
  std::size_t readyCount_ = 0;
  bool isCounting_ = false;   // this round finds out what is expected
  bool hasArrivals_ = false;  // the round was driven by gradients
  std::string finding_;       // of the checks, in this round
  bool inRound_ = false;
  int rounds_ = 0;
  bool synchronized_ = false;
  bool isFinished_ = false;  // nothing has come since the last round
  std::string abandoned_;    // why, once this rank knows
  int callbackTask_ = -1;    // id of the graph task that has our callback
  RoundReport report_;
  std::shared_ptr<Timeline> timeline_;      // of this round
  std::shared_ptr<Timeline> nextTimeline_;  // of the rounds after it
};

}  // namespace farandole::ddp
