#include "ddp/bucket.h"

#include <gtest/gtest.h>

#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

TEST(Bucket, IsReadyOnceAllItsParametersAreAndAgainAfterAReset) {
  Bucket bucket(at::zeros({64}), {3, 1});
  for (int round = 0; round < 2; ++round) {
    bucket.markReady();
    EXPECT_FALSE(bucket.isReady());
    bucket.markReady();
    EXPECT_TRUE(bucket.isReady());
    bucket.reset();
  }
}

TEST(Bucket, HoldsTheAverageAfterTheWait) {
  runThreads(3, [](ThreadRank& self) {
    at::Tensor data = at::full({64}, self.rank + 1.0, at::kDouble);
    Bucket bucket(data, {0});
    bucket.issue(*self.group);
    bucket.wait(*self.group);
    EXPECT_TRUE(at::allclose(data, at::full({64}, 2.0, at::kDouble)));
    bucket.wait(*self.group);  // nothing is left to wait for
    EXPECT_EQ(self.backend->events, (std::vector<std::string>{"allreduce 64", "wait"}));
  });
}

TEST(Bucket, ReducesComplexGradientsAsPairs) {
  runThreads(2, [](ThreadRank& self) {
    at::Tensor data = at::full({64}, c10::complex<float>(self.rank, 2), at::kComplexFloat);
    Bucket bucket(data, {0});
    bucket.issue(*self.group);
    bucket.wait(*self.group);
    EXPECT_TRUE(data.equal(at::full({64}, c10::complex<float>(0.5, 2), at::kComplexFloat)));
    EXPECT_EQ(self.backend->events.front(), "allreduce 128");
  });
}

TEST(Bucket, NeedsNoCollectiveAloneOrWhenEmpty) {
  runThreads(1, [](ThreadRank& self) {
    at::Tensor data = at::ones({64});
    Bucket alone(data, {0});
    alone.issue(*self.group);
    alone.wait(*self.group);
    EXPECT_TRUE(data.equal(at::ones({64})));
    EXPECT_TRUE(self.backend->events.empty());
  });
  runThreads(2, [](ThreadRank& self) {
    Bucket empty(at::zeros({0}), {0});
    empty.issue(*self.group);
    empty.wait(*self.group);
    EXPECT_TRUE(self.backend->events.empty());
  });
}

TEST(Bucket, AFailedWaitThrowsAndLeavesNothingBehind) {
  runThreads(2, [](ThreadRank& self) {
    self.backend->failure = "the wire broke";
    Bucket bucket(at::ones({64}), {0});
    bucket.issue(*self.group);
    EXPECT_THROW(bucket.wait(*self.group), c10::Error);
    self.backend->failure.clear();
    bucket.wait(*self.group);
    EXPECT_EQ(self.backend->events.size(), 2U);
  });
}

}  // namespace
}  // namespace farandole::ddp
