// Gradients that come to sums of a round that were not reset, in backwards that do not synchronize.

#include <gtest/gtest.h>

#include "ddp/grad_reducer.h"
#include "tests/ddp/reducer_models.h"
#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

constexpr Gradients::Home kHomes[] = {Gradients::Home::kGrad, Gradients::Home::kBucketView, Gradients::Home::kMainGrad};
constexpr const char* kTold = "rank 1 of the group: parameter 'p1' gets a gradient while the gradients of the step";

void accumulate(GradReducer& reducer, const std::vector<at::Tensor>& tensors) {
  reducer.setRequireSync(false);
  backward(lossOf(tensors, {0, 1}, 1));
  reducer.setRequireSync(true);
}

TEST(Overrun, OfOneRankIsToldToAllByTheNextRound) {
  for (const Gradients::Home home : kHomes) {
    for (const bool isSharded : {false, true}) {
      if (isSharded && home != Gradients::Home::kMainGrad) continue;
      runThreads(2, [home, isSharded](ThreadRank& self) {
        std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
        auto reducer = GradReducer::create(
            self.group, modelOf(tensors),
            {.buffers = {.bucketSize = 1, .sharded = isSharded}, .home = home, .isAveraged = isSharded});
        for (int time = 0; time < 2; ++time) {
          backward(lossOf(tensors, {0, 1}, self.rank));
          if (self.rank == 0) reducer->forgetGrads();
          EXPECT_EQ(reducer->overrun(), "");
          accumulate(*reducer, tensors);
          accumulate(*reducer, tensors);
          EXPECT_EQ(reducer->overrun().find("parameter 'p0' gets a gradient while"),
                    self.rank == 1 ? 0 : std::string::npos);
          EXPECT_FALSE(reducer->isReduced());
          const std::string error = errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); });
          EXPECT_NE(error.find(kTold), std::string::npos) << error;
          EXPECT_EQ(error.find("rank 0"), std::string::npos) << error;
          EXPECT_EQ(reducer->overrun(), "") << "it is told";
          reducer->forgetGrads();
        }
      });
    }
  }
}

TEST(Overrun, IsNoneWhereGradientsAreResetBeforeTheNextRound) {
  for (const Gradients::Home home : kHomes) {
    runThreads(2, [home](ThreadRank& self) {
      std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
      auto reducer = GradReducer::create(self.group, modelOf(tensors),
                                         {.buffers = {.bucketSize = 1}, .home = home, .isAveraged = false});
      const auto& grads = reducer->buffers()->mainGrads();
      const std::vector<std::function<void()>> resets = {[&] { reducer->zeroGrads(); }, [&] { reducer->forgetGrads(); },
                                                         [&] {
                                                           reducer->forgetSomeGrads({0, 1}, false);
                                                         },
                                                         [&] {
                                                           reducer->forgetSomeGrads({0, 1}, true);
                                                         },
                                                         [&] {
                                                           for (const at::Tensor& grad : grads) grad.detach().zero_();
                                                         }};
      for (const auto& reset : resets) {
        backward(lossOf(tensors, {0, 1}, self.rank + 1));
        if (self.rank == 1) accumulate(*reducer, tensors);
        reset();
        EXPECT_EQ(reducer->overrun(), "");
        accumulate(*reducer, tensors);
        EXPECT_EQ(reducer->overrun(), "");
        EXPECT_EQ(errorOf([&] { backward(lossOf(tensors, {0, 1}, self.rank)); }), "");
        for (const at::Tensor& grad : grads) EXPECT_TRUE(isEverywhere(grad, 3));
        reducer->forgetGrads();
      }
    });
  }
}

TEST(Overrun, IsToldByTheCallThatEndsARoundToo) {
  for (const bool overlaps : {false, true}) {
    runThreads(2, [overlaps](ThreadRank& self) {
      std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
      auto reducer = GradReducer::create(
          self.group, modelOf(tensors),
          {.home = Gradients::Home::kMainGrad, .overlaps = overlaps, .endsWithBackward = false, .isAveraged = false});
      backward(lossOf(tensors, {0, 1}, 1));
      reducer->finishSync();
      if (self.rank == 0) reducer->zeroGrads();
      accumulate(*reducer, tensors);
      const std::string error = errorOf([&] { reducer->finishSync(); });
      EXPECT_NE(error.find("rank 1 of the group: parameter 'p0' gets a gradient while"), std::string::npos) << error;
    });
  }
}

TEST(Overrun, IsKnownToTheReducerThatFollows) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    const auto make = [&] { return GradReducer::create(self.group, modelOf(tensors), {.isAveraged = false}); };
    auto reducer = make();
    backward(lossOf(tensors, {0, 1}, 1));
    if (self.rank == 0) reducer->forgetGrads();
    accumulate(*reducer, tensors);
    auto next = make();
    for (std::size_t p = 0; p < tensors.size(); ++p) {
      next->buffers()->mainGrads()[p].copy_(tensors[p].grad());
      tensors[p].mutable_grad() = next->buffers()->mainGrads()[p];
    }
    next->follow(*reducer);
    reducer.reset();
    const std::string error = errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); });
    EXPECT_NE(error.find(kTold), std::string::npos) << error;
  });
}

TEST(Overrun, OfABackwardThatIsKnownLateToSynchronizeIsToldByItself) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.isAveraged = false});
    backward(lossOf(tensors, {0, 1}, 1));
    if (self.rank == 0) reducer->forgetGrads();
    reducer->prepareForward(true);
    const at::Tensor output = lossOf(tensors, {0}, 1);
    reducer->watchOutputs({output});
    const at::Tensor early = lossOf(tensors, {1}, 1);
    reducer->prepareForward(false);  // of a forward in no_sync, before the backward of the one above
    // The gradient of 'p1' comes before that backward reaches what the forward has returned.
    const std::string error = errorOf([&] { backward(output + early); });
    EXPECT_NE(error.find(kTold), std::string::npos) << error;
  });
}

}  // namespace
}  // namespace farandole::ddp
