#pragma once

#include <cstdint>
#include <functional>

namespace farandole::pipeline::sparse {

// Batches are numbered from 0 as they are asked for; what they are only their stages know.
using BatchNo = std::uint64_t;

enum class Loaded { kBatch, kEndOfData };

// What a rank has to say of a batch when the ranks exchange their splits.
enum class Presence { kBatch, kEndOfData, kFailed };

enum class Exchanged { kBatch, kEndOfData };

// What is done with a batch before its forward. Calls may block, and throw what the caller of the pipeline is to get.
// They come from the thread that drives the pipeline and from the pipeline's own, for one batch one after the other;
// load() never runs twice at once, nor do the three of the input_dist.
class BatchStages {
 public:
  virtual ~BatchStages() = default;

  // Takes the next batch from where batches come from, and brings it to the device.
  virtual Loaded load(BatchNo batch) = 0;

  // input_dist: starts the exchange of splits; waits for it and starts that of the data; waits for the data. A rank
  // without the batch takes part in the first. finishDist throws where another rank has failed; so may completeDist.
  virtual void startDist(BatchNo batch, Presence presence) = 0;
  virtual Exchanged finishDist(BatchNo batch) = 0;
  virtual void completeDist(BatchNo batch) = 0;

  // Whether every rank has all the batches that it wants; called on all ranks, in turn with the forwards.
  virtual bool agreeOnMore(bool hasMore) = 0;

  // The batch will have no forward, since it has failed, here or on another rank; or since the data ended on another
  // rank, or the pipeline is cleared.
  virtual void discard(BatchNo batch, bool hasFailed) = 0;

  // Runs a task of a thread of the pipeline's own, which calls these.
  virtual void onThread(const std::function<void()>& task) { task(); }

  // Called now and then by a thread that waits; may throw, which ends the wait.
  virtual void checkInterrupts() = 0;
};

}  // namespace farandole::pipeline::sparse
