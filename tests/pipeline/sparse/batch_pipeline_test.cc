#include "pipeline/sparse/batch_pipeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <thread>

namespace farandole::pipeline::sparse {
namespace {

// What ranks exchange: the n-th call of each meets the n-th of all others. A rank that nobody meets gets an error.
class Meeting {
 public:
  explicit Meeting(std::size_t ranks) : ranks_(ranks) {}

  void post(std::size_t round, int value) {
    {
      const std::lock_guard lock(mutex_);
      values_[round].push_back(value);
    }
    changed_.notify_all();
  }

  std::vector<int> wait(std::size_t round) {
    std::unique_lock lock(mutex_);
    const bool isWhole =
        changed_.wait_for(lock, std::chrono::seconds(20), [&] { return values_[round].size() == ranks_; });
    if (!isWhole) throw std::logic_error("nobody came to round " + std::to_string(round));
    return values_[round];
  }

 private:
  std::size_t ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::size_t, std::vector<int>> values_;
};

struct Data {
  int batches = 0;
  std::set<int> loadFails = {}, completeFails = {};  // by index in this source
};

// One rank: batches are (source, index). Checks that stages come in order and one at a time.
class Rank : public BatchStages {
 public:
  Rank(Meeting* splits, Meeting* ends) : splits_(splits), ends_(ends) {}

  Loaded load(BatchNo batch) override {
    EXPECT_FALSE(isLoading_.exchange(true));
    isLoading_ = false;
    if (index_ == data_.batches) return Loaded::kEndOfData;
    const int index = index_++;
    if (data_.loadFails.contains(index)) throw std::runtime_error("load " + std::to_string(index));
    const std::lock_guard lock(mutex_);
    indices_[batch] = index;
    return Loaded::kBatch;
  }

  void startDist(BatchNo batch, Presence presence) override {
    EXPECT_FALSE(isInDist_.exchange(true));
    EXPECT_EQ(presence == Presence::kBatch, has(batch));
    splits_->post(round_, static_cast<int>(presence));
  }

  Exchanged finishDist(BatchNo batch) override {
    const auto said = splits_->wait(round_++);
    EXPECT_TRUE(isInDist_.exchange(false));
    if (std::ranges::count(said, static_cast<int>(Presence::kEndOfData)) > 0) return Exchanged::kEndOfData;
    if (std::ranges::count(said, static_cast<int>(Presence::kFailed)) > 0 && has(batch)) {
      throw std::runtime_error("another rank");
    }
    return Exchanged::kBatch;
  }

  void completeDist(BatchNo batch) override {
    if (data_.completeFails.contains(indexOf(batch)))
      throw std::runtime_error("complete " + std::to_string(indexOf(batch)));
  }

  bool agreeOnMore(bool hasMore) override {
    ends_->post(agreements_, hasMore ? 1 : 0);
    return std::ranges::count(ends_->wait(agreements_++), 0) == 0;
  }

  void discard(BatchNo batch, bool hasFailed) override {
    if (has(batch) && !hasFailed) discarded.push_back(indexOf(batch));
  }
  void checkInterrupts() override {}

  bool has(BatchNo batch) {
    const std::lock_guard lock(mutex_);
    return indices_.contains(batch);
  }
  int indexOf(BatchNo batch) {
    const std::lock_guard lock(mutex_);
    return indices_.at(batch);
  }
  void setSource(Data data) {
    data_ = std::move(data);
    index_ = 0;
  }
  int taken() const { return index_; }

  std::vector<int> discarded;

 private:
  Meeting* splits_;
  Meeting* ends_;
  Data data_;
  int index_ = 0;
  std::size_t round_ = 0, agreements_ = 0;
  std::atomic<bool> isLoading_ = false, isInDist_ = false;
  std::mutex mutex_;
  std::map<BatchNo, int> indices_;
};

// What the caller of a pipeline saw of one source: "0 1 load 2 3 end", say.
std::string epoch(BatchPipeline& pipeline, Rank& rank) {
  std::ostringstream seen;
  bool isNew = true;
  while (true) {
    try {
      const auto batch = pipeline.begin(isNew);
      isNew = false;
      if (!batch) break;
      seen << rank.indexOf(*batch) << ' ';
      pipeline.beside();
      pipeline.middle();
      pipeline.end();
    } catch (const std::runtime_error& error) {
      isNew = false;
      seen << error.what() << ' ';
    }
  }
  seen << "end";
  return seen.str();
}

struct World {
  explicit World(std::size_t size, BatchPipelineOptions options = {}) : splits(size), ends(size) {
    for (std::size_t i = 0; i < size; ++i) {
      ranks.push_back(std::make_shared<Rank>(&splits, &ends));
      pipelines.push_back(std::make_unique<BatchPipeline>(ranks.back(), options));
    }
  }

  std::vector<std::string> epochs(const std::vector<Data>& data) {
    std::vector<std::string> seen(ranks.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      threads.emplace_back([&, i] {
        ranks[i]->setSource(data[i]);
        seen[i] = epoch(*pipelines[i], *ranks[i]);
      });
    }
    for (auto& thread : threads) thread.join();
    return seen;
  }

  Meeting splits, ends;
  std::vector<std::shared_ptr<Rank>> ranks;
  std::vector<std::unique_ptr<BatchPipeline>> pipelines;
};

BatchPipelineOptions withThreads(ThreadUse load, ThreadUse dist) {
  BatchPipelineOptions options;
  options.loadThread = load;
  options.distThread = dist;
  return options;
}

class WithThreads : public testing::TestWithParam<std::pair<ThreadUse, ThreadUse>> {
 protected:
  BatchPipelineOptions options() const { return withThreads(GetParam().first, GetParam().second); }
};

INSTANTIATE_TEST_SUITE_P(Every, WithThreads,
                         testing::Values(std::pair{ThreadUse::kNever, ThreadUse::kNever},
                                         std::pair{ThreadUse::kAlways, ThreadUse::kNever},
                                         std::pair{ThreadUse::kNever, ThreadUse::kAlways},
                                         std::pair{ThreadUse::kAlways, ThreadUse::kAlways},
                                         std::pair{ThreadUse::kAsMeasured, ThreadUse::kAsMeasured}));

TEST_P(WithThreads, ComputesEveryBatchOfEverySourceInItsOrder) {
  World world(1, options());
  for (const int batches : {0, 1, 2, 3, 5, 0, 1}) {
    std::string expected;
    for (int i = 0; i < batches; ++i) expected += std::to_string(i) + " ";
    EXPECT_EQ(world.epochs({{batches}}).front(), expected + "end");
    EXPECT_EQ(world.pipelines[0]->inFlight(), 0);
  }
}

TEST_P(WithThreads, HasTwoMoreBatchesInFlightThanTheOneThatComputes) {
  World world(1, options());
  Rank& rank = *world.ranks[0];
  BatchPipeline& pipeline = *world.pipelines[0];
  rank.setSource({10});
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(rank.indexOf(*pipeline.begin(i == 0)), i);
    pipeline.beside();
    pipeline.end();
    EXPECT_EQ(rank.taken(), std::min(10, i + 3));
  }
  EXPECT_FALSE(pipeline.begin(false));
  EXPECT_FALSE(pipeline.begin(false));
}

TEST_P(WithThreads, EndsOnAllRanksWhereTheFirstOneHasNoMore) {
  std::random_device device;
  for (int trial = 0; trial < 20; ++trial) {
    const unsigned seed = device();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    World world(1 + random() % 4, options());
    for (int source = 0; source < 3; ++source) {
      std::vector<Data> data;
      for (std::size_t i = 0; i < world.ranks.size(); ++i) data.push_back({static_cast<int>(random() % 7)});
      const int fewest = std::ranges::min(data, {}, &Data::batches).batches;
      std::string expected;
      for (int i = 0; i < fewest; ++i) expected += std::to_string(i) + " ";
      for (auto& rank : world.ranks) rank->discarded.clear();
      const auto seen = world.epochs(data);
      for (std::size_t i = 0; i < seen.size(); ++i) {
        EXPECT_EQ(seen[i], expected + "end");
        // What was taken from the source is computed or handed back.
        EXPECT_EQ(world.ranks[i]->taken(), fewest + static_cast<int>(world.ranks[i]->discarded.size()));
      }
    }
  }
}

TEST_P(WithThreads, ThrowsWhatAStageThrewAtItsBatchOnAllRanksAndGoesOn) {
  std::random_device device;
  for (int trial = 0; trial < 20; ++trial) {
    const unsigned seed = device();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    World world(2, options());
    std::vector<Data> data(2, Data{8});
    for (int i = 0; i < 8; ++i) {
      if (random() % 3 == 0) data[random() % 2].loadFails.insert(i);
    }
    std::vector<std::string> expected(2);
    for (int i = 0; i < 8; ++i) {
      for (int rank = 0; rank < 2; ++rank) {
        const bool failsHere = data[rank].loadFails.contains(i);
        const bool failsThere = data[1 - rank].loadFails.contains(i);
        expected[rank] += failsHere ? "load " + std::to_string(i) : failsThere ? "another rank" : std::to_string(i);
        expected[rank] += ' ';
      }
    }
    const auto seen = world.epochs(data);
    EXPECT_EQ(seen[0], expected[0] + "end");
    EXPECT_EQ(seen[1], expected[1] + "end");
  }
}

TEST_P(WithThreads, ThrowsWhatTheWaitForDataThrewAtItsBatch) {
  World world(1, options());
  EXPECT_EQ(world.epochs({{4, {}, {1, 3}}}).front(), "0 complete 1 2 complete 3 end");
}

TEST(BatchPipeline, RunsNoInputDistBesideAForwardThatForbidsIt) {
  auto options = withThreads(ThreadUse::kNever, ThreadUse::kAlways);
  options.completesAhead = false;
  World world(1, options);
  BatchPipeline& pipeline = *world.pipelines[0];
  world.ranks[0]->setSource({3, {}, {1}});  // would throw on its thread
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(pipeline.begin(i == 0));
    pipeline.beside(false);
    pipeline.end();
  }
  EXPECT_FALSE(pipeline.begin(false));
}

TEST_P(WithThreads, WithoutExecutingAllBatchesKeepsTwoForTheNextSource) {
  auto options = this->options();
  options.executeAllBatches = false;
  World world(2, options);
  // Ranks that differ stop together, before the first batch whose third is missing on any of them.
  EXPECT_EQ(world.epochs({{5}, {4}}), std::vector<std::string>(2, "0 1 end"));
  EXPECT_EQ(world.pipelines[0]->inFlight(), 3);
  EXPECT_EQ(world.pipelines[1]->inFlight(), 2);
  EXPECT_EQ(world.epochs({{1}, {2}}), (std::vector<std::string>{"2 3 end", "2 3 end"}));
  EXPECT_EQ(world.epochs({{0}, {0}}), std::vector<std::string>(2, "end"));
  EXPECT_EQ(world.pipelines[0]->inFlight(), 2);
  EXPECT_EQ(world.pipelines[1]->inFlight(), 2);
}

TEST_P(WithThreads, ExecutesWhatIsInFlightOnceItIsTo) {
  auto options = this->options();
  options.executeAllBatches = false;
  World world(2, options);
  const auto set = [&](bool executesAll) {
    for (auto& pipeline : world.pipelines) pipeline->setExecutesAllBatches(executesAll);
  };
  EXPECT_EQ(world.epochs({{5}, {4}}), std::vector<std::string>(2, "0 1 end"));
  set(true);
  EXPECT_EQ(world.epochs({{0}, {0}}), std::vector<std::string>(2, "2 3 end"));
  EXPECT_EQ(world.ranks[0]->discarded, std::vector<int>{4});
  for (const auto& pipeline : world.pipelines) EXPECT_EQ(pipeline->inFlight(), 0);
  set(false);
  EXPECT_EQ(world.epochs({{4}, {4}}), std::vector<std::string>(2, "0 1 end"));
  for (const auto& pipeline : world.pipelines) EXPECT_EQ(pipeline->inFlight(), 2);
}

TEST_P(WithThreads, WithoutAnInputDistHasOneBatchAhead) {
  auto options = this->options();
  options.hasDist = false;
  World world(1, options);
  EXPECT_EQ(world.epochs({{4, {2}}}).front(), "0 1 load 2 3 end");
  world.ranks[0]->setSource({5});
  EXPECT_TRUE(world.pipelines[0]->begin(true));
  world.pipelines[0]->beside();
  world.pipelines[0]->end();
  EXPECT_EQ(world.ranks[0]->taken(), 2);
}

TEST_P(WithThreads, GoesOnWithASourceThatComesBeforeTheEndOfTheOneBefore) {
  World world(1, options());
  Rank& rank = *world.ranks[0];
  BatchPipeline& pipeline = *world.pipelines[0];
  for (int source = 0; source < 5; ++source) {  // one batch in each
    rank.setSource({1});
    ASSERT_TRUE(pipeline.begin(true));
    pipeline.beside();
    pipeline.end();
  }
  EXPECT_FALSE(pipeline.begin(false));
}

TEST_P(WithThreads, IsEmptyAfterItWasCleared) {
  World world(1, options());
  Rank& rank = *world.ranks[0];
  BatchPipeline& pipeline = *world.pipelines[0];
  rank.setSource({10});
  ASSERT_TRUE(pipeline.begin(true));
  pipeline.beside();
  pipeline.end();
  pipeline.clear();
  EXPECT_EQ(pipeline.inFlight(), 0);
  EXPECT_EQ(rank.discarded, (std::vector<int>{1, 2}));
  EXPECT_EQ(rank.indexOf(*pipeline.begin(false)), 3);
}

}  // namespace
}  // namespace farandole::pipeline::sparse
