#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ddp/bucket_group.h"
#include "ddp/issue_queue.h"
#include "ddp/model_buffers.h"
#include "ddp/reducer_options.h"
#include "ddp/round_report.h"
#include "ddp/timeline.h"

namespace farandole::ddp {

// The reductions of one round: which bucket groups are ready, in which order they
// are issued, and their ends. Not synchronized: its GradReducer is; only await()
// and learnOrder() block, and nothing else may be called meanwhile.
class BucketIssuer {
 public:
  BucketIssuer(const DataParallelGroups& groups, const ModelBuffers& buffers, const ReducerOptions& options);

  // All gradients of the parameter that this round expects are there.
  void markReady(int parameter);

  // Issues all groups whose turn it is. `check` is called with each bucket before.
  void issue(const std::function<void(int bucket)>& check);

  // All are waited for, also after a failure: a reduction that is under way still writes into its bucket.
  void await();

  // Collective, after a round: takes over the order in which groups became ready on rank 0, unless that says that
  // its round shows none. True when the order is learned.
  bool learnOrder(const RoundReport& report, bool showsOrder);

  // For the next round.
  void reset();

  // Reductions are recorded there; null: nowhere. Between rounds.
  void record(std::shared_ptr<Timeline> timeline) { timeline_ = std::move(timeline); }

 private:
  void advance(bool wait);
  void recordEnds(int bucketGroup);  // of its reductions, whose last step has started

  const DataParallelGroups groups_;
  std::vector<BucketGroup> bucketGroups_;
  std::vector<std::vector<int>> bucketsOf_;  // by bucket group
  std::vector<int> bucketGroupOf_;           // by parameter
  std::vector<IssueQueue> queues_;           // of dense buckets, of experts
  std::vector<int> issued_;                  // bucket groups, in the order of their issue
  std::size_t advanced_ = 0;                 // how many of them have come to their last step
  std::shared_ptr<Timeline> timeline_;
  std::vector<std::size_t> reductions_;  // by bucket: the timeline's event, once issued
};

}  // namespace farandole::ddp
