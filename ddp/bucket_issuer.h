#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ddp/bucket_group.h"
#include "ddp/issue_queue.h"
#include "ddp/model_buffers.h"
#include "ddp/order_learning.h"
#include "ddp/reducer_options.h"
#include "ddp/round_report.h"
#include "ddp/timeline.h"

namespace farandole::ddp {

// The reductions of one round: which bucket groups are ready, in which order they
// are issued, and their ends. Not synchronized: its GradReducer is; only await()
// and agreeOnOrder() block, and nothing else may be called meanwhile.
//
// On the CPU experts have an order of their own where they share no group with the
// others. On devices all buckets have one: NCCL wants that of the communicators of a
// device (they may wait for each other on the host, while they connect, and on the
// device), and which bucket is ready first may differ by rank where not all use their
// experts. An order of buckets of several groups is that by index: they have no ranks in
// common that could agree.
class BucketIssuer {
 public:
  BucketIssuer(const DataParallelGroups& groups, const ModelBuffers& buffers, const ReducerOptions& options);

  // The hook reduces all buckets from now on, in index order.
  void setHook(const std::shared_ptr<CommHook>& hook);

  // What sums are multiplied by, in the rounds from now on.
  void setScale(double scale);

  // All gradients of the parameter that this round expects are there.
  void markReady(int parameter);

  // Where a bucket's gradients are. Called before it is issued.
  using PartsOf = std::function<Parts(int bucket)>;

  // Issues all groups whose turn it is.
  void issue(const PartsOf& partsOf);

  std::size_t bucketGroups() const { return bucketGroups_.size(); }
  int bucketGroupOf(int parameter) const { return bucketGroupOf_[parameter]; }

  // By parameter: whether its gradient is averaged over those that it is summed over.
  std::vector<char> areAveraged() const;

  // Whether the parameter's gradient may lie elsewhere than in its bucket until it is reduced.
  bool takesPart(int parameter) const { return bucketGroups_[bucketGroupOf_[parameter]].takesParts(); }
  // Whether any may, and be there ever after, where there is no hook.
  bool reducesInPlaces() const;

  // All are waited for, also after a failure: a reduction that is under way still writes into its bucket.
  void await();

  // What becomes ready from now on in this round has got no gradient that it waits for.
  void endArrivals();

  // After a round: by queue, whether this rank asks for another order, by its own where that `showsOrder`.
  std::array<bool, 2> departures(bool showsOrder);
  // Then, with the report in which all have told that: a collective where any asks.
  void agreeOnOrder(const RoundReport& report);
  // Whether the experts' queue has an order to agree on.
  bool ordersExperts() const { return learns_[1]; }

  // For the next round.
  void reset();

  // Reductions are recorded there; null: nowhere. Between rounds.
  void record(std::shared_ptr<Timeline> timeline) { timeline_ = std::move(timeline); }

 private:
  const Replicas& replicasOf(std::size_t queue) const { return queue == 0 ? groups_.dense : groups_.experts; }
  void advance(bool wait);
  void recordEnds(int bucketGroup);  // of its reductions, whose last step has started

  const DataParallelGroups groups_;
  std::vector<std::shared_ptr<Reduction>> reductions_;  // of dense buckets, of experts
  std::vector<BucketGroup> bucketGroups_;
  std::vector<std::vector<int>> bucketsOf_;  // by bucket group
  std::vector<int> bucketGroupOf_;           // by parameter
  std::vector<IssueQueue> queues_;           // of dense buckets or of all, of experts
  std::vector<OrderLearning> learning_;      // of each
  std::array<bool, 2> learns_{};             // of each
  std::vector<int> issued_;                  // bucket groups, in the order of their issue
  std::size_t advanced_ = 0;                 // how many of them have come to their last step
  std::size_t released_ = 0;                 // and how many need no part of theirs any more
  std::shared_ptr<Timeline> timeline_;
  std::vector<std::size_t> events_;  // by bucket: the timeline's, once issued
};

}  // namespace farandole::ddp
