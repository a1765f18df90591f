// Stages on threads beside the forward of the batch before.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "pipeline/sparse/batch_pipeline.h"

namespace farandole::pipeline::sparse {
namespace {

// Stages that end only when all three of a step are under way.
class Together : public BatchStages {
 public:
  explicit Together(BatchNo loadsAhead = 2) : loadsAhead_(loadsAhead) {}

  void meet(BatchNo step) {
    std::unique_lock lock(mutex_);
    ++arrived_[step];
    changed_.notify_all();
    if (!changed_.wait_for(lock, std::chrono::seconds(20), [&] { return arrived_[step] == 3; })) {
      throw std::runtime_error("alone");
    }
  }

  Loaded load(BatchNo batch) override {
    expectInTask();
    if (batch >= loadsAhead_) meet(batch - loadsAhead_);
    return Loaded::kBatch;
  }
  void startDist(BatchNo /*batch*/, Presence /*presence*/) override { expectInTask(); }
  Exchanged finishDist(BatchNo batch) override {
    expectInTask();
    if (batch >= 1) meet(batch - 1);
    return Exchanged::kBatch;
  }
  void completeDist(BatchNo /*batch*/) override { expectInTask(); }
  bool agreeOnMore(bool /*hasMore*/) override { return true; }
  void discard(BatchNo /*batch*/, bool /*hasFailed*/) override {}
  void checkInterrupts() override {}
  void onThread(const std::function<void()>& task) override {
    EXPECT_NE(std::this_thread::get_id(), caller_);
    isInTask = true;
    task();
    isInTask = false;
    ++tasks;
  }

  std::atomic<int> tasks = 0;

 private:
  void expectInTask() const { EXPECT_EQ(isInTask, std::this_thread::get_id() != caller_); }

  static inline thread_local bool isInTask = false;
  const std::thread::id caller_ = std::this_thread::get_id();
  BatchNo loadsAhead_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<BatchNo, int> arrived_;
};

void runTogether(bool executeAllBatches) {
  const auto stages = std::make_shared<Together>(executeAllBatches ? 2 : 3);
  BatchPipelineOptions options;
  options.loadThread = options.distThread = ThreadUse::kAlways;
  options.executeAllBatches = executeAllBatches;
  BatchPipeline pipeline(stages, options);
  for (BatchNo step = 0; step < 10; ++step) {
    const auto batch = pipeline.begin(step == 0);
    ASSERT_EQ(batch, step);
    pipeline.beside();
    stages->meet(*batch);
    pipeline.end();
  }
  EXPECT_EQ(stages->tasks, 20);  // a load and an input_dist in each step
}

TEST(BatchPipeline, RunsLoadAndInputDistBesideTheForwardOnThreads) { runTogether(true); }

TEST(BatchPipeline, RunsThemSoWhereNotAllBatchesAreExecuted) { runTogether(false); }

constexpr auto kLong = std::chrono::milliseconds(3);

// Endless batches that compute nothing.
class Sleeping : public BatchStages {
 public:
  explicit Sleeping(bool inLoad) : inLoad_(inLoad) {}
  Loaded load(BatchNo /*batch*/) override {
    if (inLoad_) std::this_thread::sleep_for(kLong);
    return Loaded::kBatch;
  }
  void startDist(BatchNo /*batch*/, Presence /*presence*/) override {}
  Exchanged finishDist(BatchNo /*batch*/) override { return Exchanged::kBatch; }
  void completeDist(BatchNo /*batch*/) override {}
  bool agreeOnMore(bool /*hasMore*/) override { return true; }
  void discard(BatchNo /*batch*/, bool /*hasFailed*/) override {}
  void checkInterrupts() override {}
  void onThread(const std::function<void()>& task) override {
    ++tasks;
    task();
  }

  std::atomic<int> tasks = 0;

 private:
  bool inLoad_;
};

// Whether the stage that waits is tried on a thread.
void expectThread(bool inLoad) {
  BatchPipelineOptions options;
  options.completesAhead = false;
  BatchPipeline pipeline(std::make_shared<Sleeping>(inLoad), options);
  const auto isOnThread = [&] {
    return inLoad ? pipeline.threads().loadOnThread() : pipeline.threads().distOnThread();
  };
  for (std::size_t step = 0; step < ThreadChoice::kWarmUp + ThreadChoice::kWindow; ++step) {
    EXPECT_FALSE(isOnThread());
    ASSERT_TRUE(pipeline.begin(step == 0));
    pipeline.beside();
    if (!inLoad) pipeline.waitForData([] { std::this_thread::sleep_for(kLong); });
    pipeline.end();
  }
  EXPECT_TRUE(isOnThread());
}

TEST(BatchPipeline, TriesALoadThatWaitsOnAThread) { expectThread(true); }

TEST(BatchPipeline, TriesAnInputDistOnAThreadWhereForwardsWaitForItsData) { expectThread(false); }

// Where it may not leave the caller's thread it is not measured, nor moved when the thread is due for others.
TEST(BatchPipeline, LeavesALoadWhereItIsThatMayNotRunOnAThread) {
  for (const auto use : {ThreadUse::kAsMeasured, ThreadUse::kAlways}) {
    BatchPipelineOptions options;
    options.loadThread = use;
    const auto stages = std::make_shared<Sleeping>(true);
    BatchPipeline pipeline(stages, options);
    for (std::size_t step = 0; step < ThreadChoice::kWarmUp + ThreadChoice::kWindow + 1; ++step) {
      ASSERT_TRUE(pipeline.begin(step == 0));
      pipeline.beside(true, false);
      pipeline.end();
    }
    EXPECT_EQ(pipeline.threads().loadOnThread(), use == ThreadUse::kAlways);
    EXPECT_EQ(stages->tasks, 0);
  }
}

}  // namespace
}  // namespace farandole::pipeline::sparse
