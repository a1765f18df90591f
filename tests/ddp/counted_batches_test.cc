// Rounds that a call ends, of several backwards, where the first one counts what each parameter gets.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "ddp/grad_reducer.h"
#include "ddp/ready_hook.h"
#include "tests/ddp/reducer_models.h"
#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

using Order = std::vector<std::size_t>;

struct Batches {
  explicit Batches(ThreadRank& self) : self_(self) {
    reducer = GradReducer::create(self.group, modelOf(tensors),
                                  {.buffers = {.bucketSize = 1},
                                   .home = Gradients::Home::kMainGrad,
                                   .unused = UnusedParameters::kErrorInUsedGroup,
                                   .endsWithBackward = false,
                                   .isGraphStatic = true});
    // After the reducer's, which issues what it can.
    hook_ = std::make_unique<ReadyHook>(
        tensors[0], [this](const at::Tensor&) { self_.backend->events.emplace_back("last gradient"); });
  }

  // Gradients come in the order p2, p1, p0.
  void backwards(int times) {
    for (int i = 0; i < times; ++i) {
      reducer->prepareForward(true);
      backward(lossOf(tensors, {0, 1, 2}, self_.rank));
    }
  }

  // What has happened in a batch: buckets by their elements, and when the last gradients of a backward came.
  std::vector<std::string> batch(int times) {
    reducer->zeroGrads();
    self_.backend->events.clear();
    backwards(times);
    reducer->finishSync();
    return self_.backend->events;
  }

  std::vector<at::Tensor> tensors = {parameter(64), parameter(128), parameter(192)};
  std::shared_ptr<GradReducer> reducer;

 private:
  ThreadRank& self_;
  std::unique_ptr<ReadyHook> hook_;
};

std::vector<std::string> withoutReports(std::vector<std::string> events) {
  std::erase_if(events, [](const std::string& event) {
    return event != "last gradient" && event != "allreduce 64" && event != "allreduce 128" && event != "allreduce 192";
  });
  return events;
}

TEST(CountedBatches, OverlapAfterTheFirstOneInWhichNothingDoes) {
  runThreads(2, [](ThreadRank& self) {
    Batches batches(self);
    const std::string last = "last gradient";
    const std::vector<std::string> first = {last, last, "allreduce 192", "allreduce 128", "allreduce 64"};
    EXPECT_EQ(withoutReports(batches.batch(2)), first);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(withoutReports(batches.batch(2)),
                (std::vector<std::string>{last, "allreduce 192", "allreduce 128", "allreduce 64", last}));
      for (const at::Tensor& grad : batches.reducer->buffers()->mainGrads()) EXPECT_TRUE(isEverywhere(grad, 1));
    }
  });
}

TEST(CountedBatches, ABucketOrderIsLearnedFromTheSecondOneOn) {
  runThreads(2, [](ThreadRank& self) {
    Batches batches(self);
    const auto step = [&](const Order& order) {
      batches.reducer->zeroGrads();
      self.backend->events.clear();
      batches.reducer->prepareForward(true);
      backward(lossOf(batches.tensors, order, 1));
      batches.reducer->finishSync();
      return withoutReports(self.backend->events);
    };
    // p0, p2, p1: by index in the first two, as they come from then on.
    step({1, 2, 0});
    step({1, 2, 0});
    EXPECT_EQ(step({1, 2, 0}),
              (std::vector<std::string>{"allreduce 64", "last gradient", "allreduce 192", "allreduce 128"}));
  });
}

TEST(CountedBatches, AForwardBeforeTheEndIsAnErrorOnceAllGradientsHaveCome) {
  runThreads(1, [](ThreadRank& self) {
    Batches batches(self);
    batches.batch(2);
    batches.batch(2);
    batches.backwards(2);
    const std::string early = errorOf([&] { batches.backwards(1); });
    EXPECT_NE(early.find("a forward began before finish_grad_sync() was called."), std::string::npos) << early;
    EXPECT_NE(early.find("that the first batch had were all there"), std::string::npos) << early;
    batches.batch(2);
    const std::string more = errorOf([&] {
      batches.reducer->zeroGrads();
      batches.reducer->prepareForward(true);
      for (int i = 0; i < 3; ++i) backward(lossOf(batches.tensors, {0, 1, 2}, 1));
      batches.reducer->finishSync();
    });
    EXPECT_NE(more.find("parameter 'p2' got more gradients than the 2 that it had in the first batch"),
              std::string::npos)
        << more;
    batches.batch(1);  // fewer are no trouble
  });
}

TEST(CountedBatches, GradientsAreNotResetInTheMiddleOfOne) {
  runThreads(2, [](ThreadRank& self) {
    Batches batches(self);
    if (self.rank == 1) batches.backwards(1);
    const std::string error = errorOf([&] { batches.batch(1); });
    EXPECT_NE(error.find("rank 1 of the group: gradients were reset before finish_grad_sync() was called"),
              std::string::npos)
        << error;
    batches.batch(1);
  });
}

}  // namespace
}  // namespace farandole::ddp
