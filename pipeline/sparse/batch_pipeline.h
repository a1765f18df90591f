#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>

#include "pipeline/sparse/batch_stages.h"
#include "pipeline/sparse/stage_thread.h"
#include "pipeline/sparse/thread_choice.h"

namespace farandole::pipeline::sparse {

struct BatchPipelineOptions {
  // Without it a step needs three batches: the last two stay for the next source (torchrec's execute_all_batches). The
  // third one of the next step is loaded beside this one's forward.
  bool executeAllBatches = true;
  // Whether batches have an input_dist at all; without it two are in flight, the one that computes and the next one.
  bool hasDist = true;
  // Whether the data of an input_dist is waited for before its batch's forward begins, or, where no thread has waited
  // for it, by what that calls.
  bool completesAhead = true;
  ThreadUse loadThread = ThreadUse::kAsMeasured;
  ThreadUse distThread = ThreadUse::kAsMeasured;
};

// The three batches in flight of a sparse train pipeline: i computes, i+1 is in its input_dist, i+2 is loaded. The
// caller computes between begin() and end(), and calls beside() and middle() there; what the stages do beside that is
// done when end() returns, so that nothing runs between two steps. What a stage throws comes out of the begin() of its
// batch, where a plain loop would have thrown it, and the batches after it go on. All methods belong to one thread.
// (The pipeline is that of torchrec's TrainPipelineSparseDist.)
class BatchPipeline {
 public:
  BatchPipeline(std::shared_ptr<BatchStages> stages, const BatchPipelineOptions& options);
  ~BatchPipeline();
  BatchPipeline(const BatchPipeline&) = delete;
  BatchPipeline& operator=(const BatchPipeline&) = delete;

  // The batch to compute, or nothing at the end of the data, on this rank or on any. A new source is asked for batches
  // though the one before had none left.
  std::optional<BatchNo> begin(bool isNewSource);

  // Before the forward: starts the stages of the batches after it, or runs them. Whether an input_dist, and whether a
  // load, may run beside this forward at all.
  void beside(bool mayDistBeside = true, bool mayLoadBeside = true);

  // After the forward: what waits for other ranks may go on.
  void middle();

  // After the computing, also where that has failed.
  void end();

  // Discards what is in flight.
  void clear();

  // From the next begin() on, between two steps: see BatchPipelineOptions.
  void setExecutesAllBatches(bool executesAll);

  std::size_t inFlight() const { return slots_.size(); }
  // In a forward: `wait` waits for data that no thread has waited for before.
  void waitForData(const std::function<void()>& wait) { timed(times_.distBlocked, wait); }
  const ThreadChoice& threads() const { return threads_; }

 private:
  struct Slot {
    BatchNo batch = 0;
    bool isEnd = false;  // no batch: the source has ended here, or the data on some rank
    bool hasStarted = false, hasFinished = false, hasCompleted = false;  // its input_dist
    std::exception_ptr error;
  };

  void join();
  Slot& newSlot();
  void load(Slot& slot);
  void startDist(Slot& slot);
  void finishDist(Slot& slot);
  void completeDist(Slot& slot);
  void distBeside(Slot& slot);
  bool wantsMore(std::size_t most) const;
  void loadHere();
  void exchangeFirst();
  void completeNext();
  void takeNewSource();
  bool fillAndAgree();
  void fill();
  void dropAll();
  void dropFirst(bool hasFailed);
  void timed(double& blocked, const std::function<void()>& call);

  std::shared_ptr<BatchStages> stages_;
  BatchPipelineOptions options_;
  std::size_t depth_;
  std::size_t mostComputing_ = 0;  // in flight beside a forward: all that the next step must have, too
  std::deque<Slot> slots_;
  BatchNo next_ = 0;
  bool sourceEnded_ = false;
  bool isComputing_ = false, hasBeside_ = false;
  std::chrono::steady_clock::time_point began_{};
  StepTimes times_;
  ThreadChoice threads_;
  bool loadIsBeside_ = false, distIsBeside_ = false;  // tasks under way
  StageThread loadThread_{"farandole-load"};
  StageThread distThread_{"farandole-dist"};
};

}  // namespace farandole::pipeline::sparse
