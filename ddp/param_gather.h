#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "ddp/model_buffers.h"
#include "ddp/timeline.h"

namespace farandole::ddp {

// Brings the parameters that each rank has updated, its part of every bucket, to all
// others: one all-gather for each bucket, group by group, in the order in which a
// forward through the modules as registered needs them (the reverse of the gradients').
// Whatever order a forward really has, ranks start them in that one, so that they cannot
// mismatch. Threads: any; a wait holds no lock that another group needs.
class ParamGather {
 public:
  // Of sharded buffers.
  ParamGather(const DataParallelGroups& groups, std::shared_ptr<ModelBuffers> buffers);

  // What other ranks own is old from now on, in every bucket. Nothing may be under way.
  void markStale();

  // Starts all that are stale.
  void start();

  // Starts those that come before this one in the order, and it.
  void startThrough(int bucketGroup);

  // Waits for these groups, which are started if need be, as all that come before them. True when one was needed
  // before another that comes before it in the order: then overlap is lost. On CUDA the current stream waits, also for
  // what another one has waited for; after finishAll() whoever uses other streams makes them follow this one.
  bool finish(const std::vector<int>& bucketGroups);
  void finishAll();

  // Gathers that start from now on are recorded there; null: nowhere.
  void record(std::shared_ptr<Timeline> timeline);

  // No group is stale or under way. Cheap. Whoever is told so may read what another thread has awaited. On CUDA groups
  // that finish() has waited for are under way until finishAll(): other streams have not.
  bool isCurrent() const { return unfinished_.load(std::memory_order_acquire) == 0; }

  // By trainable parameter, in registration order: the group that it comes with.
  const std::vector<int>& bucketGroupOf() const { return bucketGroupOf_; }

 private:
  struct Gather {
    at::Tensor whole;
    at::Tensor part;
    Group group;
    WorkPtr work;
    int bucket = 0;
    std::shared_ptr<Timeline> timeline;  // has this event
    std::size_t event = 0;
  };
  struct GroupState {
    std::vector<Gather> gathers;
    bool isStarted = true;
    bool isFinished = true;           // somebody has waited for it
    bool isOver = true;               // nobody need wait for it
    std::vector<c10::Stream> behind;  // on CUDA: those that have waited
  };

  void startNext();  // with mutex_ held
  void finishOne(int bucketGroup);
  // With mutex_ held:
  bool mustWait(const GroupState& state) const;
  void end(GroupState& state);
  c10::Stream currentStream() const;

  const std::shared_ptr<ModelBuffers> buffers_;
  std::vector<int> bucketGroupOf_;
  std::mutex mutex_;  // guards all below
  std::vector<GroupState> states_;
  std::shared_ptr<Timeline> timeline_;
  int next_ = -1;  // the group to be started next; -1: all are
  std::atomic<int> unfinished_{0};
};

}  // namespace farandole::ddp
