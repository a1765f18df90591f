#include "ddp/bucket.h"

#include <gtest/gtest.h>

#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

std::shared_ptr<const Reduction> reductionOf(const Replicas& replicas, const Reduction::Options& options) {
  return std::make_shared<Reduction>(replicas, c10::kCPU, options);
}

std::shared_ptr<const Reduction> averageOf(const ThreadRank& self) {
  return reductionOf({self.group, nullptr}, {.scale = 1.0 / self.group->getSize()});
}

TEST(Bucket, HoldsTheAverageAfterTheWait) {
  runThreads(3, [](ThreadRank& self) {
    at::Tensor data = at::full({64}, self.rank + 1.0, at::kDouble);
    Bucket bucket(data, averageOf(self));
    bucket.issue();
    bucket.advance(true);
    bucket.wait();
    EXPECT_TRUE(at::allclose(data, at::full({64}, 2.0, at::kDouble)));
    bucket.wait();  // nothing is left to wait for
    EXPECT_EQ(self.backend->events, (std::vector<std::string>{"allreduce 64", "wait"}));
  });
}

TEST(Bucket, ReducesComplexGradientsAsPairs) {
  runThreads(2, [](ThreadRank& self) {
    at::Tensor data = at::full({64}, c10::complex<float>(self.rank, 2), at::kComplexFloat);
    Bucket bucket(data, averageOf(self));
    bucket.issue();
    bucket.wait();
    EXPECT_TRUE(data.equal(at::full({64}, c10::complex<float>(0.5, 2), at::kComplexFloat)));
    EXPECT_EQ(self.backend->events.front(), "allreduce 128");
  });
}

TEST(Bucket, NeedsNoCollectiveAloneOrWhenEmptyButIsScaled) {
  runThreads(1, [](ThreadRank& self) {
    at::Tensor data = at::ones({64});
    Bucket alone(data, reductionOf({self.group, nullptr}, {.scale = 0.25}));  // an expert with one replica of four
    alone.issue();
    alone.wait();
    EXPECT_TRUE(data.equal(at::full({64}, 0.25)));
    EXPECT_TRUE(self.backend->events.empty());
  });
  runThreads(2, [](ThreadRank& self) {
    Bucket empty(at::zeros({0}), averageOf(self));
    empty.issue();
    empty.wait();
    EXPECT_TRUE(self.backend->events.empty());
  });
}

TEST(Bucket, AFailedWaitThrowsAndLeavesNothingBehind) {
  runThreads(2, [](ThreadRank& self) {
    self.backend->failure = "the wire broke";
    Bucket bucket(at::ones({64}), averageOf(self));
    bucket.issue();
    EXPECT_THROW(bucket.wait(), c10::Error);
    self.backend->failure.clear();
    bucket.wait();
    EXPECT_EQ(self.backend->events.size(), 2U);
  });
}

TEST(Bucket, WhereShardedEachRankHasItsPartOfTheResult) {
  for (const bool averageInCollective : {false, true}) {
    runThreads(2, [&](ThreadRank& self) {
      at::Tensor data = at::arange(8, at::kDouble) * (self.rank + 1);
      const auto reduction = reductionOf({self.group, nullptr},
                                         {.scale = 0.25, .sharded = true, .averageInCollective = averageInCollective});
      Bucket bucket(data, reduction);
      bucket.issue();
      bucket.advance(true);
      bucket.wait();
      EXPECT_TRUE(reduction->partOf(data).equal(at::arange(4 * self.rank, 4 * self.rank + 4, at::kDouble) * 0.75));
      EXPECT_EQ(self.backend->events.front(), "reduce_scatter 8");
    });
  }
}

TEST(Bucket, InstancesAddUpTheirPartsInOneOrderOfAllBuckets) {
  for (const bool averageInCollective : {false, true}) {
    runGrid(2, 2, [&](int rank, ThreadRank& row, ThreadRank& column) {
      const auto reduction = reductionOf({row.group, column.group},
                                         {.scale = 0.25, .sharded = true, .averageInCollective = averageInCollective});
      std::vector<at::Tensor> data;
      std::vector<Bucket> buckets;
      for (int64_t size : {8, 16}) {
        data.push_back(at::arange(size, at::kDouble) * (rank + 1));
        buckets.emplace_back(data.back(), reduction);
      }
      for (Bucket& bucket : buckets) bucket.issue();
      for (Bucket& bucket : buckets) EXPECT_TRUE(bucket.advance(true));
      for (Bucket& bucket : buckets) bucket.wait();
      for (const at::Tensor& tensor : data) {
        const int64_t part = tensor.numel() / 2;
        EXPECT_TRUE(
            reduction->partOf(tensor).equal(at::arange(part * row.rank, part * (row.rank + 1), at::kDouble) * 2.5));
      }
      EXPECT_EQ(column.backend->events, (std::vector<std::string>{"allreduce 4", "allreduce 8", "wait", "wait"}));
    });
  }
}

}  // namespace
}  // namespace farandole::ddp
