// The order in which a reducer issues its buckets: where control flow departs from what was learned, overlap comes
// back.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "ddp/grad_reducer.h"
#include "ddp/order_learning.h"
#include "ddp/ready_hook.h"
#include "tests/ddp/reducer_models.h"
#include "tests/ddp/thread_group.h"
#include "tests/random_seed.h"

namespace farandole::ddp {
namespace {

// Of so many parameters, each in a bucket of another size: that of parameter i is 64 * (i + 1).
struct Replica {
  Replica(ThreadRank& self, std::size_t count, UnusedParameters unused) : self_(self) {
    for (std::size_t i = 0; i < count; ++i) tensors.push_back(parameter(static_cast<int64_t>(64 * (i + 1))));
    reducer = GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}, .unused = unused});
    for (std::size_t i = 0; i < count; ++i) {  // after the reducer's: each sees what its own gradient set off
      observers_.emplace_back(
          tensors[i], [this, i](const at::Tensor&) { self_.backend->events.push_back("grad " + std::to_string(i)); });
    }
  }

  // A step in which gradients come in this order, each `scale` everywhere.
  void step(std::vector<std::size_t> arrivals, double scale = 1) {
    for (at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
    reducer->prepareForward(true);
    self_.backend->events.clear();
    std::reverse(arrivals.begin(), arrivals.end());
    backward(lossOf(tensors, arrivals, scale));
  }

  // The parameters whose buckets were issued in the last step, in order; only `before` the last gradient came.
  std::vector<std::size_t> issued(bool before) const {
    const std::vector<std::string>& events = self_.backend->events;
    const auto isGrad = [](const std::string& event) { return event.starts_with("grad "); };
    const auto last = std::find_if(events.rbegin(), events.rend(), isGrad).base();
    std::vector<std::size_t> parameters;
    for (auto event = events.begin(); event != (before ? last : events.end()); ++event) {
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (*event == "allreduce " + std::to_string(64 * (i + 1))) parameters.push_back(i);
      }
    }
    return parameters;
  }

  std::vector<at::Tensor> tensors;
  std::shared_ptr<GradReducer> reducer;

 private:
  ThreadRank& self_;
  std::vector<ReadyHook> observers_;
};

using Order = std::vector<std::size_t>;

TEST(IssueOrder, FromTheSecondRoundOnIsThatOfTheRankWhereEachBucketComesLast) {
  runThreads(2, [](ThreadRank& self) {
    Replica replica(self, 3, UnusedParameters::kError);
    // A round without backward shows no order.
    replica.reducer->startSync();
    replica.reducer->finishSync();
    const Order arrivals = self.rank == 0 ? Order{0, 1, 2} : Order{1, 0, 2};
    for (int round = 0; round < 3; ++round) {
      replica.step(arrivals);
      EXPECT_EQ(replica.issued(false), round == 0 ? (Order{2, 1, 0}) : (Order{1, 0, 2}));
    }
  });
}

TEST(IssueOrder, WhereABranchChangesForGoodOverlapIsThereAgainInTheNextRound) {
  for (const auto unused : {UnusedParameters::kZeroFill, UnusedParameters::kSkip}) {
    runThreads(2, [unused](ThreadRank& self) {
      Replica replica(self, 5, unused);
      const Order first = {4, 2, 1, 0};  // 4 or 3, then the trunk
      const Order later = {3, 2, 1, 0};
      for (int round = 0; round < 4; ++round) replica.step(first);
      EXPECT_EQ(replica.issued(true), first);
      replica.step(later);
      EXPECT_TRUE(replica.issued(true).empty()) << "all behind a bucket that comes last";
      replica.step(later);
      EXPECT_EQ(replica.issued(true), (Order{2, 1, 0}));
      for (int round = 0; round < 2 * OrderLearning::kWindow; ++round) replica.step(later);
      EXPECT_EQ(replica.issued(true), later);
      EXPECT_EQ(countOf(self.backend->events, "wait"), 6U) << "five buckets and the report, no more";
    });
  }
}

TEST(IssueOrder, WhereOneRankDepartsAllFollow) {
  for (const int departs : {0, 2}) {
    runThreads(3, [departs](ThreadRank& self) {
      Replica replica(self, 4, UnusedParameters::kZeroFill);
      for (int round = 0; round < 3; ++round) replica.step({3, 2, 1, 0});
      EXPECT_EQ(replica.issued(true), (Order{3, 2, 1, 0}));
      const Order now = self.rank == departs ? Order{2, 1, 0} : Order{3, 2, 1, 0};
      replica.step(now);
      replica.step(now);
      EXPECT_EQ(replica.issued(false), (Order{2, 1, 0, 3}));
      EXPECT_EQ(replica.issued(true), (self.rank == departs ? Order{2, 1, 0} : Order{2, 1, 0, 3}));
    });
  }
}

TEST(IssueOrder, ARoundThatAForwardCutShortTeachesNothing) {
  runThreads(2, [](ThreadRank& self) {
    Replica replica(self, 3, UnusedParameters::kError);
    replica.step({1, 2, 0});
    const Order learned = {1, 2, 0};
    {
      ReadyHook bomb(replica.tensors[2], [](const at::Tensor&) { TORCH_CHECK(false, "bomb"); });
      EXPECT_EQ(errorOf([&] { replica.step({2, 1, 0}); }), "bomb");
    }
    EXPECT_NE(errorOf([&] { replica.reducer->prepareForward(true); }).find("a forward began before"),
              std::string::npos);
    replica.step(learned);
    EXPECT_EQ(replica.issued(true), learned);
  });
}

// Ranks that depart and ranks that do not, for a while or for good; against sums.
TEST(IssueOrder, RandomControlFlowGivesAllRanksOneOrderAndRightSums) {
  const std::uint64_t seed = farandole::testing::someSeed();
  SCOPED_TRACE("FARANDOLE_TEST_SEED=" + std::to_string(seed));
  for (std::uint64_t model = 0; model < 12; ++model) {
    std::mt19937_64 common(seed * 100 + model);
    const int size = 2 + static_cast<int>(common() % 3);
    const std::size_t count = 2 + common() % 6;
    const auto unused = common() % 2 == 0 ? UnusedParameters::kZeroFill : UnusedParameters::kSkip;
    std::vector<std::vector<Order>> issued(size);  // by rank and round
    runThreads(size, [&](ThreadRank& self) {
      Replica replica(self, count, unused);
      // Every rank draws what all do, so that each knows the sums.
      std::mt19937_64 random(seed * 100 + model);
      std::vector<Order> flows(size, allOf(replica.tensors));
      for (int round = 0; round < 50; ++round) {
        for (Order& flow : flows) {
          if (random() % 8 != 0) continue;
          flow = allOf(replica.tensors);
          std::shuffle(flow.begin(), flow.end(), random);
          flow.resize(1 + random() % count);
        }
        replica.step(flows[self.rank], self.rank + 1);
        issued[self.rank].push_back(replica.issued(false));
        std::map<std::size_t, double> sums;
        for (int rank = 0; rank < size; ++rank) {
          for (const std::size_t i : flows[rank]) sums[i] += rank + 1;
        }
        for (std::size_t i = 0; i < count; ++i) {
          if (!sums.contains(i) && unused == UnusedParameters::kSkip) {
            EXPECT_FALSE(replica.tensors[i].grad().defined()) << round;
          } else {
            EXPECT_TRUE(replica.tensors[i].grad().allclose(at::full({1}, sums[i] / size, at::kDouble))) << round;
          }
        }
      }
    });
    for (const std::vector<Order>& of : issued) EXPECT_EQ(of, issued[0]) << "model " << model;
  }
}

}  // namespace
}  // namespace farandole::ddp
