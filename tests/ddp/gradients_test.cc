#include "ddp/gradients.h"

#include <gtest/gtest.h>

#include "ddp/grad_reducer.h"
#include "tests/ddp/reducer_models.h"
#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

constexpr int64_t kLarge = 1 << 14;  // elements
using Events = std::vector<std::string>;

// What reductions take in a backward with these parameters, whose gradients are 1.5 then.
Events takenBy(ThreadRank& self, const std::vector<at::Tensor>& tensors, ReducerOptions options) {
  self.backend->gathersTensors = true;
  options.averageInCollective = true;  // what must be scaled before is copied
  auto reducer = GradReducer::create(self.group, modelOf(tensors), options);
  self.backend->events.clear();
  backward(lossOf(tensors, allOf(tensors), self.rank + 1));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(isEverywhere(reducer->buffers()->mainGrads()[i], 1.5)) << i;
    if (options.home == Gradients::Home::kGrad) {
      EXPECT_TRUE(tensors[i].grad().is_alias_of(reducer->buffers()->mainGrads()[i]));
    }
  }
  Events reductions;
  for (const std::string& event : self.backend->events) {
    if (event.starts_with("allreduce") && event != "allreduce 4") reductions.push_back(event);  // that is the report
  }
  return reductions;
}

TEST(Gradients, LargeOnesAreReducedFromWhereAutogradLeftThem) {
  runThreads(2, [](ThreadRank& self) {
    const Events taken = takenBy(self, {parameter(10), parameter(kLarge), parameter(3), parameter(4)}, {});
    EXPECT_EQ(taken, Events{"allreduce 7 [" + std::to_string(kLarge) + "] 10"});
  });
}

TEST(Gradients, WithoutOverlapTheyStayThereUntilTheEndOfTheBackward) {
  const std::string lent = "allreduce [" + std::to_string(kLarge) + "]";
  runThreads(2, [&](ThreadRank& self) {
    const ReducerOptions atEnd{.buffers = {.bucketSize = 1}, .overlaps = false};
    EXPECT_EQ(takenBy(self, {parameter(kLarge), parameter(kLarge)}, atEnd), (Events{lent, lent}));
    const ReducerOptions inOne{.buffers = {.isBucketed = false}, .overlaps = false};
    const std::vector<at::Tensor> tensors = {parameter(10), parameter(kLarge)};
    EXPECT_EQ(takenBy(self, tensors, inOne), Events{lent + " 10"});
  });
}

TEST(Gradients, WhatIsSummedUpBeforeARoundIsInItsBuffer) {
  runThreads(2, [](ThreadRank& self) {
    self.backend->gathersTensors = true;
    const std::vector<at::Tensor> tensors = {parameter(kLarge)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors),
                                       {.overlaps = false, .endsWithBackward = false, .averageInCollective = true});
    self.backend->events.clear();
    backward(lossOf(tensors, allOf(tensors), self.rank + 1));
    EXPECT_TRUE(isEverywhere(reducer->buffers()->mainGrads()[0], self.rank + 1));
    reducer->finishSync();
    EXPECT_EQ(self.backend->events.front(), "allreduce " + std::to_string(kLarge));
    EXPECT_TRUE(isEverywhere(reducer->buffers()->mainGrads()[0], 1.5));
  });
}

TEST(Gradients, WhatIsCopiedOnOneRankGoesWithWhatIsNotOnAnother) {
  runThreads(2, [](ThreadRank& self) {
    const std::vector<at::Tensor> tensors = {parameter(kLarge)};
    self.backend->gathersTensors = self.rank == 0;
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.averageInCollective = true});
    backward(lossOf(tensors, allOf(tensors), self.rank + 1));
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 1.5));
  });
}

TEST(Gradients, WhatMustBeSeenBeforeOrAddedToIsInItsBuffer) {
  const std::string copied = "allreduce " + std::to_string(kLarge);
  runThreads(2, [&](ThreadRank& self) {
    EXPECT_EQ(takenBy(self, {parameter(kLarge)}, {.checks = {.nan = true}}), Events{copied});
    EXPECT_EQ(takenBy(self, {parameter(kLarge)}, {.isGraphStatic = true}), Events{copied});
    const ReducerOptions widened{.buffers = {.gradType = at::kFloat}, .home = Gradients::Home::kMainGrad};
    EXPECT_EQ(takenBy(self, {parameter(kLarge)}, widened), Events{copied});
  });
}

TEST(Gradients, WhatAccumulatedIsAddedToAndReducedInPlace) {
  runThreads(2, [](ThreadRank& self) {
    self.backend->gathersTensors = true;
    const std::vector<at::Tensor> tensors = {parameter(kLarge)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.averageInCollective = true});
    reducer->prepareForward(false);
    backward(lossOf(tensors, allOf(tensors), 10));
    self.backend->events.clear();
    reducer->prepareForward(true);
    backward(lossOf(tensors, allOf(tensors), self.rank + 1));
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 11.5));
    EXPECT_EQ(self.backend->events.front(), "allreduce " + std::to_string(kLarge));
  });
}

TEST(Gradients, ThoseThatReplaceWhatMainGradHeldNeedNoCopyEither) {
  runThreads(2, [](ThreadRank& self) {
    self.backend->gathersTensors = true;
    const std::vector<at::Tensor> tensors = {parameter(kLarge)};
    const ReducerOptions options{.home = Gradients::Home::kMainGrad, .averageInCollective = true};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), options);
    for (int step = 0; step < 2; ++step) {
      reducer->forgetGrads();
      self.backend->events.clear();
      backward(lossOf(tensors, allOf(tensors), self.rank + 1));
      EXPECT_TRUE(isEverywhere(reducer->buffers()->mainGrads()[0], 1.5));
      EXPECT_FALSE(tensors[0].grad().defined());
      EXPECT_EQ(self.backend->events.front(), "allreduce [" + std::to_string(kLarge) + "]");
    }
  });
}

TEST(Gradients, WhereShardedTheyAreReducedToTheirOwnersFromWhereTheyAre) {
  runThreads(2, [](ThreadRank& self) {
    self.backend->gathersTensors = true;
    const std::vector<at::Tensor> tensors = {parameter(kLarge), parameter(100)};
    const ReducerOptions options{
        .buffers = {.sharded = true}, .home = Gradients::Home::kMainGrad, .averageInCollective = true};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), options);
    reducer->forgetGrads();
    self.backend->events.clear();
    backward(lossOf(tensors, allOf(tensors), self.rank + 1));
    // The small one, with what fills it up to 128 elements, and the padding at the end are in the buffer.
    const int64_t rest = reducer->buffers()->gradsOf(0).numel() - 128 - kLarge;
    const std::string end = rest > 0 ? " " + std::to_string(rest) : "";
    EXPECT_EQ(self.backend->events.front(), "reduce_scatter 128 [" + std::to_string(kLarge) + "]" + end);
    const at::Tensor part = reducer->buffers()->gradsOf(0).chunk(2)[self.rank];
    EXPECT_TRUE(isEverywhere(self.rank == 0 ? part.slice(0, 128) : part.slice(0, 0, kLarge / 2), 1.5));
  });
}

TEST(Gradients, WhatAFunctionMayStillWriteIntoIsCopied) {
  runThreads(2, [](ThreadRank& self) {
    self.backend->gathersTensors = true;
    const std::vector<at::Tensor> tensors = {parameter(kLarge), parameter(kLarge)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.averageInCollective = true});
    self.backend->events.clear();
    // The gradients of both are views of one tensor.
    backward((tensors[0].unsqueeze(0) + tensors[1].unsqueeze(0)).mul(self.rank + 1.0).sum());
    // When the second one comes, the first one is in the buffer, and nobody is left to write.
    const std::string large = std::to_string(kLarge);
    EXPECT_EQ(self.backend->events.front(), "allreduce [" + large + "] " + large);
    for (const at::Tensor& tensor : tensors) EXPECT_TRUE(isEverywhere(tensor.grad(), 1.5));
  });
}

TEST(Gradients, ThoseOfALinearsWeightAreViewsThatNobodyElseHas) {
  runThreads(2, [](ThreadRank& self) {
    self.backend->gathersTensors = true;
    constexpr int64_t kWidth = 128;
    static_assert(kWidth * kWidth == kLarge);
    const std::vector<at::Tensor> tensors = {at::ones({kWidth, kWidth}, at::kDouble).set_requires_grad(true)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.averageInCollective = true});
    self.backend->events.clear();
    const at::Tensor input = at::full({1, kWidth}, self.rank + 1.0, at::kDouble);
    backward(at::linear(input, tensors[0]).sum());
    EXPECT_EQ(self.backend->events.front(), "allreduce [" + std::to_string(kLarge) + "]");
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 1.5));
  });
}

// Where reductions take gradients, and leave them, where they are.
class GradientsInPlaces : public ::testing::Test {
 protected:
  static constexpr int64_t kSmall = 10;

  // Of a large parameter and a small one.
  static void run(const std::function<void(ThreadRank&, GradReducer&, const std::vector<at::Tensor>&)>& body,
                  const ReducerOptions& options = {.averageInCollective = true}) {
    runThreads(2, [&](ThreadRank& self) {
      self.backend->gathersTensors = self.backend->reducesTensorsInPlaces = true;
      const std::vector<at::Tensor> tensors = {parameter(kSmall), parameter(kLarge)};
      auto reducer = GradReducer::create(self.group, modelOf(tensors), options);
      self.backend->events.clear();
      body(self, *reducer, tensors);
    });
  }

  static void step(ThreadRank& self, GradReducer& reducer, const std::vector<at::Tensor>& tensors) {
    reducer.prepareForward(true);
    backward(lossOf(tensors, allOf(tensors), self.rank + 1));
  }

  static std::string takeEvent(ThreadRank& self) {
    const std::string event = self.backend->events.at(0);
    self.backend->events.clear();
    return event;
  }

  static void empty(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
  }

  static inline const std::string kInPlaces = "allreduce in " + std::to_string(kLarge) + " " + std::to_string(kSmall);
  static inline const std::string kInBuffer = "allreduce " + std::to_string(kLarge + kSmall);
};

TEST_F(GradientsInPlaces, LargeOnesStayWhereAutogradLeftThem) {
  run([](ThreadRank& self, GradReducer& reducer, const std::vector<at::Tensor>& tensors) {
    for (int round = 0; round < 2; ++round) {
      step(self, reducer, tensors);
      EXPECT_EQ(takeEvent(self), kInPlaces);
      for (int p = 0; p < 2; ++p) {
        EXPECT_TRUE(isEverywhere(tensors[p].grad(), 1.5));
        EXPECT_EQ(tensors[p].grad().const_data_ptr(), reducer.buffers()->mainGrads()[p].const_data_ptr());
        EXPECT_EQ(reducer.buffers()->hasMoved(p), p == 1);
      }
      const at::Tensor buffer = reducer.buffers()->gradsOf(0);
      EXPECT_TRUE(isEverywhere(buffer.slice(0, 0, kLarge), 0));
      EXPECT_TRUE(isEverywhere(buffer.slice(0, kLarge), 1.5));
      empty(tensors);
    }
  });
}

TEST_F(GradientsInPlaces, WhatAccumulatedIsAddedToWhereItIs) {
  run([](ThreadRank& self, GradReducer& reducer, const std::vector<at::Tensor>& tensors) {
    reducer.prepareForward(false);
    backward(lossOf(tensors, allOf(tensors), 10));
    const void* const before = tensors[1].grad().const_data_ptr();
    EXPECT_TRUE(reducer.buffers()->hasMoved(1));
    step(self, reducer, tensors);
    EXPECT_EQ(takeEvent(self), kInPlaces);
    EXPECT_EQ(tensors[1].grad().const_data_ptr(), before);
    for (const at::Tensor& tensor : tensors) EXPECT_TRUE(isEverywhere(tensor.grad(), 11.5));
  });
}

TEST_F(GradientsInPlaces, AFirstRoundThatCountsLeavesThemToo) {
  run(
      [](ThreadRank& self, GradReducer& reducer, const std::vector<at::Tensor>& tensors) {
        step(self, reducer, tensors);
        EXPECT_EQ(takeEvent(self), kInPlaces);
        EXPECT_TRUE(isEverywhere(tensors[1].grad(), 1.5));
      },
      {.averageInCollective = true, .isGraphStatic = true});
}

TEST_F(GradientsInPlaces, WhatIsScaledBeforeIsScaledThere) {
  run(
      [](ThreadRank& self, GradReducer& reducer, const std::vector<at::Tensor>& tensors) {
        step(self, reducer, tensors);
        EXPECT_EQ(takeEvent(self), kInPlaces);
        for (const at::Tensor& tensor : tensors) EXPECT_TRUE(isEverywhere(tensor.grad(), 1.5));
      },
      {});
}

TEST_F(GradientsInPlaces, ZeroedOnesAreInTheirBufferAgain) {
  run([](ThreadRank& self, GradReducer& reducer, const std::vector<at::Tensor>& tensors) {
    step(self, reducer, tensors);
    reducer.zeroGrads();
    for (const at::Tensor& tensor : tensors) EXPECT_TRUE(isEverywhere(tensor.grad(), 0));
    EXPECT_TRUE(isEverywhere(reducer.buffers()->gradsOf(0), 0));
    self.backend->events.clear();
    step(self, reducer, tensors);
    EXPECT_EQ(takeEvent(self), kInBuffer);
    EXPECT_TRUE(isEverywhere(reducer.buffers()->gradsOf(0), 1.5));
    EXPECT_TRUE(tensors[1].grad().is_alias_of(reducer.buffers()->gradsOf(0)));
  });
}

TEST_F(GradientsInPlaces, WhatTheUserKeepsStaysAsItIs) {
  run([](ThreadRank& self, GradReducer& reducer, const std::vector<at::Tensor>& tensors) {
    step(self, reducer, tensors);
    const at::Tensor kept = tensors[1].grad();
    empty(tensors);
    step(self, reducer, tensors);
    tensors[1].grad().mul_(2);
    EXPECT_TRUE(isEverywhere(kept, 1.5));
    EXPECT_TRUE(isEverywhere(reducer.buffers()->mainGrads()[1], 3));
  });
}

TEST_F(GradientsInPlaces, APartOfLargerMemoryIsCopied) {
  run([](ThreadRank& self, GradReducer& reducer, const std::vector<at::Tensor>& tensors) {
    reducer.prepareForward(true);
    backward(at::cat({tensors[0], tensors[1]}).mul(self.rank + 1.0).sum());  // both gradients are views of one
    for (int p = 0; p < 2; ++p) {
      EXPECT_TRUE(isEverywhere(tensors[p].grad(), 1.5));
      EXPECT_FALSE(reducer.buffers()->hasMoved(p));
    }
  });
}

TEST_F(GradientsInPlaces, ThoseThatAreAwayAreScaledToo) {
  run([](ThreadRank& self, GradReducer& reducer, const std::vector<at::Tensor>& tensors) {
    step(self, reducer, tensors);
    reducer.scaleGrads(2);
    for (const at::Tensor& tensor : tensors) EXPECT_TRUE(isEverywhere(tensor.grad(), 3));
  });
}

TEST_F(GradientsInPlaces, AForwardFreesThoseThatTheUserHasDropped) {
  run([](ThreadRank& self, GradReducer& reducer, const std::vector<at::Tensor>& tensors) {
    for (int round = 0; round < 2; ++round) step(self, reducer, tensors);
    EXPECT_TRUE(reducer.buffers()->hasMoved(1));  // also after a forward, since `.grad` has it
    const c10::weak_intrusive_ptr<c10::StorageImpl> memory(tensors[1].grad().storage().getWeakStorageImpl());
    empty(tensors);
    EXPECT_FALSE(memory.expired());
    reducer.prepareForward(true);
    EXPECT_TRUE(memory.expired());
  });
}

TEST_F(GradientsInPlaces, WhereEveryBucketIsLookedAtTheyAreInIt) {
  run(
      [](ThreadRank& self, GradReducer& reducer, const std::vector<at::Tensor>& tensors) {
        step(self, reducer, tensors);
        EXPECT_EQ(takeEvent(self), kInBuffer);
        EXPECT_FALSE(reducer.buffers()->hasMoved(1));
      },
      {.averageInCollective = true, .checks = {.nan = true}});
}

TEST_F(GradientsInPlaces, ViewsOfBucketsAreReducedIntoThem) {
  run(
      [](ThreadRank& self, GradReducer& reducer, const std::vector<at::Tensor>& tensors) {
        step(self, reducer, tensors);
        EXPECT_EQ(takeEvent(self), "allreduce [" + std::to_string(kLarge) + "] " + std::to_string(kSmall));
        EXPECT_TRUE(isEverywhere(reducer.buffers()->gradsOf(0), 1.5));
        EXPECT_TRUE(tensors[1].grad().is_alias_of(reducer.buffers()->gradsOf(0)));
      },
      {.home = Gradients::Home::kBucketView, .averageInCollective = true});
}

}  // namespace
}  // namespace farandole::ddp
