#pragma once

#include <ATen/ATen.h>

#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ddp/bucket_issuer.h"
#include "ddp/gradient_streams.h"
#include "ddp/gradients.h"
#include "ddp/hook_failure.h"
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
// after it, that in which groups become ready on the ranks (order_learning.h).
//
// Threads: methods and hooks may be called from any thread, without the GIL; one
// backward at a time. Waiting holds no lock. Lifetime: hooks hold the reducer
// weakly, a running backward holds it.
class GradReducer : public std::enable_shared_from_this<GradReducer> {
 public:
  // A collective unless all is agreed: checks that all ranks bring the same model and
  // options, then overwrites the model with that of rank 0.
  static std::shared_ptr<GradReducer> create(const DataParallelGroups& groups, const Model& model,
                                             const ReducerOptions& options, Gradients::IsAdded isAdded = {});

  GradReducer(const GradReducer&) = delete;
  GradReducer& operator=(const GradReducer&) = delete;

  // Whether gradients that become ready from now on are reduced, until the next call or, where they are not, the next
  // forward whose backward synchronizes.
  void setRequireSync(bool requireSync);

  // To be called before a forward that will be differentiated. Throws when the
  // round before was left unfinished (a backward that raised), after ending it,
  // so that other ranks do not wait and the next forward works. The first one of a
  // round looks whether parameters are what they were; `change` is what the caller
  // has found of that kind. The round then ends in an error on all ranks.
  void prepareForward(bool requireSync, const std::string& change = "");

  // From now on parameters must stay where they are in memory: somebody updates them there.
  void holdParameters();

  // Torch's communication hook, in the place of the reductions: buckets come to it in index order, with gradients that
  // are not scaled. One at most; on all ranks, between steps. Throws where it cannot do what the options ask for.
  void setCommHook(std::shared_ptr<c10d::CommHookInterface> hook);

  // To be called with what a forward has returned whose backward synchronizes: so does the backward that comes to it,
  // whatever later forwards did, and it ends the round, also where gradients come in backwards inside it alone
  // (reentrant checkpoints), or none do. Not `isOwn`: of a forward that had other parameters in place of these, so that
  // only gradients tell.
  // Returns whether a backward can come to any of them.
  bool watchOutputs(const std::vector<at::Tensor>& outputs, bool isOwn = true);
  // For who was told that none can, though the forward was to be trained on: as no round comes of it, another rank's
  // would be averaged with a later one of this rank. So a backward ends in an error on all ranks where they have had
  // unlike numbers of such forwards since the round before.
  void noteUntrained();

  // A round without hooks, e.g. after several backwards that did not synchronize:
  // issues all buckets with what they hold; finishSync waits, and does nothing
  // when no round is open. Where rounds do not end with backward, finishSync makes
  // the round if need be, once until gradients are zeroed or forgotten.
  void startSync();
  void finishSync();

  // As ReducerOptions::isGraphStatic, of what was made without it: before the first round, on all ranks. `unused` is
  // the policy from then on.
  void setGraphStatic(UnusedParameters unused);

  // Whether from now on finishBackward() ends the round of a backward, which does not wait for it then (torch's manual
  // finalization). Between rounds.
  void requireManualEnd(bool isManual);
  bool isEndManual();
  // Once for each such backward: behind it, or inside it where all gradients are there.
  void finishBackward();
  // Whether it cannot be inside the next one, whose end alone shows what it brings.
  bool needsWholeBackward();

  // For who finds that gradients of this rank would be wrong: the round that is open, or the next one, ends in this
  // error on all ranks.
  void noteTrouble(const std::string& trouble);
  // So for a rank that will not come to its backward: it makes the round that the others come to, and waits for them.
  void failRound(const std::string& trouble);

  // For ranks with uneven inputs: by how many replicas sums are divided from now on; all unless told.
  void averageOver(int replicas);

  // One that has none left does in a round what the others do, with zeros for gradients. Its own are left alone.
  void shadowRound();

  // For a rank that failed and will not call what the others call: gives the group
  // up (abandonment.h). `why` names this rank. Then, as on every rank that has
  // learned of it, all but this method throws, and gradients are left alone: the
  // parameters may be given to another reducer.
  void abandon(const std::string& why);

  // Of one for the same parameters that this one follows, between rounds: what has come since its last round.
  void follow(GradReducer& other);

  // Whether a round has ended since the last beginStep() or setRequireSync(false):
  // a rank that fails after that is not waited for.
  void beginStep();
  bool isSynchronized();

  // As Gradients'.
  void zeroGrads();
  void forgetGrads();
  void forgetSomeGrads(const std::vector<int>& parameters, bool zeroes);
  void scaleGrads(double factor);

  // The memory of main_grads, which nothing else may be in (GradHome::kMainGrad), is free for others; until it is
  // restored, as zeros, gradients are refused. Between rounds.
  void freeGrads();
  void restoreGrads();
  // Throws meanwhile.
  void checkGrads();

  // Whether what the buffers hold is the result of a round.
  bool isReduced();
  // Between rounds: what the next one will tell all ranks of gradients that have come to such a result since, where it
  // cannot be added to; empty where none have, or where they were reset.
  std::string overrun();

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

  // A round without hooks. Returns the first gradient that does not fit, in words, which the round is told of.
  std::string openRound();
  void onGradReady(int parameter, const at::Tensor& brought);
  void onOutputReached(bool isOwn);
  // Without mutex_: whether the backward that runs is for parameters that have gradients.
  bool isForParameters() const;
  void onBackwardEnd(int task);
  void finishRound(RoundEnd end);
  // What is wrong on any rank; `trouble` is this one's, `untrained` its number of forwards to compare, if any. `idle`:
  // the parameters that it has nothing to add to.
  std::string awaitRound(const std::vector<int>& idle, const std::string& trouble, std::optional<int> untrained);

  // With mutex_ held:
  void queueBackwardEnd();
  void markReady(int parameter);
  // The backward that runs synchronizes though the last forward does not.
  void beginLateSync();
  // Those that have got nothing.
  std::vector<int> markRest(RoundEnd end);
  // What it failed with, for throwWithReason().
  std::exception_ptr issueReady();
  void keep(int parameter);
  void resetRound();
  void clearRound();
  void takeTimeline();
  // A round that a call ends may have several backwards: whether more gradients are to come, for all that is known.
  bool expectsMore() const;
  void noteReset();  // of gradients, which is too early in such a round
  void lookForChange();
  void checkUsable() const;
  void checkHasMemory() const;
  void note(std::string trouble);
  void noteStale(int parameter);
  // Whether the gradient that has come need not be in its buffer to be reduced.
  bool borrows(int parameter) const;
  std::string troubleOf(const std::vector<int>& unused, RoundEnd end) const;
  std::string nameOfThis() const;
  // Those that must not be unused.
  std::vector<int> wrongOf(const std::vector<int>& unused) const;
  // With mutex_ free, since the store is asked: throws why the group was abandoned if it was, else this.
  [[noreturn]] void throwWithReason(const std::exception_ptr& failure);
  // With mutex_ free: a hook has failed here. Where it has on all ranks the round is over, else the group is given up.
  [[noreturn]] void throwFailure(const HookFailure& failure);
  void leaveAbandoned();

  const DataParallelGroups groups_;
  const std::shared_ptr<ModelBuffers> buffers_;
  const std::vector<ModelParameter>& parameters_;  // the buffers'
  const ReducerOptions options_;
  c10d::ProcessGroup& group_;  // the dense one
  std::vector<ReadyHook> hooks_;

  std::mutex mutex_;  // guards all below
  BucketIssuer issuer_;
  Gradients gradients_;
  GradientStreams streams_;
  bool requireSync_ = true;
  bool isSyncLate_ = false;  // it is for this round alone
  bool isSyncHeld_ = false;  // somebody who knows backwards has said no, whatever their outputs are
  bool hasCommHook_ = false;
  std::vector<int> expected_;  // by parameter: gradients in a round
  std::vector<int> arrived_;
  std::vector<char> ready_;
  std::vector<int> early_;         // that have got one in this backward, before it was known to synchronize
  int earlyTask_ = -1;             // its graph task
  std::vector<char> touched_;      // has got a gradient since the last round, also where that did not synchronize
  std::vector<char> isGroupUsed_;  // by bucket group: has got a gradient in any round
  std::size_t readyCount_ = 0;
  UnusedParameters unused_;   // as the options say, unless the graph was said to be static later
  bool isCounting_ = false;   // this round finds out what is expected
  bool hasCounted_ = false;   // one has
  bool hasArrivals_ = false;  // the round is driven by gradients, whose order it shows
  std::string finding_;       // in this round, of the checks or of gradients that cannot be added
  std::string change_;        // of the model, since it was wrapped
  int lookedInRound_ = -1;
  std::vector<const void*> held_;  // by parameter: where it has to be; empty where anywhere will do
  bool inRound_ = false;
  bool isExplicit_ = false;  // startSync() has opened the round
  bool endsWithBackward_;    // as the options say, unless a call is to end rounds
  int rounds_ = 0;
  bool synchronized_ = false;
  bool areGradsFree_ = false;                     // their memory
  bool isFinished_ = false;                       // nothing has come since the last round
  std::string abandoned_;                         // why, once this rank knows
  int callbackTask_ = -1;                         // id of the graph task that has our callback
  int outputTask_ = -1;                           // of the one that has come to an output before any gradient
  std::vector<std::pair<int, at::Tensor>> kept_;  // by parameter that is skipped: what it holds
  std::vector<int> leftOut_;  // of an explicit round, where those that nothing has come for are skipped
  int untrained_ = 0;         // forwards since the last round, of those that noteUntrained() is for
  RoundReport report_;
  std::shared_ptr<Timeline> timeline_;      // of this round
  std::shared_ptr<Timeline> nextTimeline_;  // of the rounds after it
};

}  // namespace farandole::ddp
