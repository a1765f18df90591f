#include "ddp/grad_reducer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "ddp/ready_hook.h"
#include "tests/ddp/reducer_models.h"
#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

TEST(GradReducer, BucketsAreIssuedInIndexOrderWhateverOrderGradientsComeIn) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    runThreads(2, [seed](ThreadRank& self) {
      // Bucket i has a size of its own, so that the log tells them apart; ranks differ in their orders.
      std::vector<at::Tensor> tensors;
      for (int64_t i = 8; i > 0; --i) tensors.push_back(parameter(64 * i));
      auto reducer = GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}});
      std::vector<size_t> order = allOf(tensors);
      std::mt19937_64 random(seed * 2 + self.rank);
      std::shuffle(order.begin(), order.end(), random);
      self.backend->events.clear();
      backward(lossOf(tensors, order, self.rank + 1));
      std::vector<std::string> expected;
      for (int64_t i = 1; i <= 8; ++i) expected.push_back("allreduce " + std::to_string(64 * i));
      expected.insert(expected.end(), 8, "wait");
      expected.insert(expected.end(),
                      {"allreduce 4", "wait", "allreduce 8", "wait"});  // what the ranks report; the order to come
      EXPECT_EQ(self.backend->events, expected);
      for (const at::Tensor& tensor : tensors) EXPECT_TRUE(isEverywhere(tensor.grad(), 1.5));
    });
  }
}

TEST(GradReducer, TheFirstBucketIsIssuedWhileBackwardStillRuns) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(192), parameter(128), parameter(64)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}});
    std::vector<ReadyHook> observers;  // after the reducer's: each sees what its own gradient set off
    for (size_t i = 0; i < tensors.size(); ++i) {
      observers.emplace_back(
          tensors[i], [&self, i](const at::Tensor&) { self.backend->events.push_back("grad " + std::to_string(i)); });
    }
    self.backend->events.clear();
    backward(lossOf(tensors, {0, 1, 2}, 1));
    EXPECT_EQ(self.backend->events,
              (std::vector<std::string>{"allreduce 64", "grad 2", "allreduce 128", "grad 1", "allreduce 192", "grad 0",
                                        "wait", "wait", "wait", "allreduce 4", "wait"}));
  });
}

TEST(GradReducer, WithoutSyncGradientsAccumulateAndTheNextSyncAveragesTheirSum) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {});
    self.backend->events.clear();
    reducer->setRequireSync(false);
    backward(lossOf(tensors, {0, 1}, self.rank));
    backward(lossOf(tensors, {0}, 10));
    EXPECT_TRUE(self.backend->events.empty());
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), self.rank + 10.0));
    reducer->setRequireSync(true);
    backward(lossOf(tensors, {0, 1}, 100));
    EXPECT_EQ(countOf(self.backend->events, "wait"), 2U);  // for the bucket, and for what the ranks report
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 110.5));
    EXPECT_TRUE(isEverywhere(tensors[1].grad(), 100.5));
  });
}

TEST(GradReducer, GradientsAreViewsOfMainGradAlsoAfterTheUserSetsThemToNothing) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {});
    for (int step = 1; step <= 3; ++step) {
      backward(lossOf(tensors, {0, 1}, step * (self.rank + 1)));
      for (size_t i = 0; i < tensors.size(); ++i) {
        EXPECT_TRUE(tensors[i].grad().is_same(reducer->buffers()->mainGrads()[i]));
        EXPECT_TRUE(isEverywhere(tensors[i].grad(), 1.5 * step));
        tensors[i].mutable_grad().reset();
      }
    }
  });
}

TEST(GradReducer, AGradientThatTheUserReplacedCountsWithItsValue) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {});
    tensors[0].mutable_grad() = at::full({10}, 100.0 * self.rank, at::kDouble);
    backward(lossOf(tensors, {0}, 1));
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 51));
    EXPECT_TRUE(tensors[0].grad().is_same(reducer->buffers()->mainGrads()[0]));
  });
}

TEST(GradReducer, AnUnusedParameterIsNamedOnEveryRankAndNobodyWaits) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20), parameter(30)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}});
    const auto order = self.rank == 0 ? std::vector<size_t>{0, 1, 2} : std::vector<size_t>{1};
    const std::string error = errorOf([&] { backward(lossOf(tensors, order, 2)); });
    EXPECT_NE(error.find("rank 1 of the group: 2 of 3 parameters got no gradient"), std::string::npos) << error;
    EXPECT_NE(error.find("'p0', 'p2'"), std::string::npos) << error;
    EXPECT_EQ(error.find("'p1'"), std::string::npos) << error;
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 1));
    EXPECT_TRUE(isEverywhere(tensors[1].grad(), 2));
    EXPECT_TRUE(isEverywhere(tensors[2].grad(), 1));
    backward(lossOf(tensors, {0, 1, 2}, 2));  // and the next round works
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 3));
  });
}

TEST(GradReducer, ZeroFillLetsUnusedParametersCountAsZeroOrAsWhatTheyAccumulated) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20), parameter(30)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.unused = UnusedParameters::kZeroFill});
    reducer->setRequireSync(false);
    if (self.rank == 1) backward(lossOf(tensors, {0}, 6));
    reducer->setRequireSync(true);
    backward(lossOf(tensors, {static_cast<size_t>(self.rank) + 1}, 2));
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 3));
    EXPECT_TRUE(isEverywhere(tensors[1].grad(), 1));
    EXPECT_TRUE(isEverywhere(tensors[2].grad(), 1));
  });
}

TEST(GradReducer, AnUnusedParameterLeavesNoGradientOfAnEarlierStepBehind) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.unused = UnusedParameters::kZeroFill});
    backward(lossOf(tensors, {0, 1}, 5));
    for (at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
    backward(lossOf(tensors, {1}, 2));
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 0));
    EXPECT_TRUE(isEverywhere(tensors[1].grad(), 2));
  });
}

TEST(GradReducer, ABackwardThatRaisedIsEndedByTheNextForward) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}});
    if (self.rank == 0) {
      const std::string error = errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); });  // waits for rank 1's part
      EXPECT_NE(error.find("rank 1 of the group: a forward began before"), std::string::npos) << error;
    } else {
      ReadyHook bomb(tensors[1], [](const at::Tensor&) { TORCH_CHECK(false, "out of memory"); });
      EXPECT_EQ(errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); }), "out of memory");
      const std::string error = errorOf([&] { reducer->prepareForward(true); });
      EXPECT_NE(error.find("Without a gradient in it: 'p0'"), std::string::npos) << error;
    }
    reducer->prepareForward(true);
    for (at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
    backward(lossOf(tensors, {0, 1}, self.rank));
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 0.5));
    EXPECT_TRUE(isEverywhere(tensors[1].grad(), 0.5));
  });
}

TEST(GradReducer, AParameterThatHasChangedIsNamedOnAllRanks) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}});
    const at::Tensor data = tensors[1].detach();
    const auto errorWith = [&](const at::Tensor& given, const std::string& change = "") {
      if (self.rank == 1) tensors[1].set_data(given);
      reducer->prepareForward(true, change);
      return errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); });
    };
    EXPECT_EQ(errorWith(data.clone()), "");  // nobody needs it where it was
    EXPECT_EQ(errorWith(data), "");
    reducer->holdParameters();
    std::string error = errorWith(data.clone());
    EXPECT_NE(error.find("rank 1 of the group: parameter 'p1' has got other memory"), std::string::npos) << error;
    EXPECT_EQ(errorWith(data), "");
    error = errorWith(data, self.rank == 0 ? "a weight is new" : "");
    EXPECT_NE(error.find("rank 0 of the group: a weight is new"), std::string::npos) << error;
    error = errorWith(data.to(at::kFloat));
    EXPECT_NE(error.find("rank 1 of the group: parameter 'p1' has changed its type"), std::string::npos) << error;
  });
}

TEST(GradReducer, AFailedCollectiveComesOutOfBackwardAndTheNextRoundWorks) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}});
    self.backend->failure = "the wire broke";
    EXPECT_EQ(errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); }), "the wire broke");
    self.backend->failure.clear();
    for (at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
    reducer->prepareForward(true);
    backward(lossOf(tensors, {0, 1}, 1));
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 1));
  });
}

TEST(GradReducer, ARankThatAbandonsEndsTheRoundOfTheOthersWithItsReason) {
  for (const bool hasBegun : {false, true}) {  // its own round
    runThreads(3, [&](ThreadRank& self) {
      std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
      auto reducer = GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}});
      const std::string expected = "rank " + std::to_string(self.rank) +
                                   " of the group cannot average gradients any more: rank 1 ran out of memory";
      if (self.rank == 1) {
        ReadyHook bomb(tensors[1], [](const at::Tensor&) { TORCH_CHECK(false, "bomb"); });
        if (hasBegun) {  // one of the two buckets: with both the others' rounds may end before they learn of it
          EXPECT_EQ(errorOf([&] { backward(lossOf(tensors, {1}, 1)); }), "bomb");
        }
        EXPECT_FALSE(reducer->isSynchronized());
        reducer->abandon("rank 1 ran out of memory");
        reducer->abandon("and then");
      } else {
        const std::string error = errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); });
        EXPECT_NE(error.find(expected), std::string::npos) << error;
        EXPECT_FALSE(reducer->isSynchronized());
      }
      for (const auto& use : std::vector<std::function<void()>>{
               [&] { reducer->prepareForward(true); }, [&] { reducer->setRequireSync(false); },
               [&] { reducer->beginStep(); }, [&] { reducer->startSync(); }, [&] { reducer->finishSync(); }}) {
        EXPECT_NE(errorOf(use).find(expected), std::string::npos);
      }
      for (at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
      backward(lossOf(tensors, {0, 1}, 3));
      EXPECT_TRUE(isEverywhere(tensors[0].grad(), 3)) << "the hooks leave gradients alone";
    });
  }
}

TEST(GradReducer, KnowsWhetherThisStepHasReduced) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {});
    for (int step = 0; step < 2; ++step) {
      step == 0 ? reducer->beginStep() : reducer->setRequireSync(false);
      EXPECT_FALSE(reducer->isSynchronized());
      reducer->setRequireSync(true);
      EXPECT_FALSE(reducer->isSynchronized());
      // A parameter that one rank leaves out is an error after the round.
      (void)errorOf([&] { backward(lossOf(tensors, self.rank == 0 ? std::vector<size_t>{0} : allOf(tensors), 1)); });
      EXPECT_TRUE(reducer->isSynchronized());
    }
  });
}

TEST(GradReducer, AnExplicitRoundAveragesWhatAccumulated) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20), parameter(30)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}});
    reducer->setRequireSync(false);
    backward(lossOf(tensors, {0, 1}, 2 * self.rank));
    reducer->startSync();
    EXPECT_NE(errorOf([&] { reducer->startSync(); }).find("call finish_grad_sync() first"), std::string::npos);
    reducer->finishSync();
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 1));
    EXPECT_TRUE(isEverywhere(tensors[2].grad(), 0));
    const size_t events = self.backend->events.size();
    reducer->finishSync();  // nothing is open
    EXPECT_EQ(self.backend->events.size(), events);
    reducer->zeroGrads();
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 0));
  });
}

TEST(GradReducer, TwoGradientsForOneParameterInOneRoundAreRefusedByName) {
  runThreads(1, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {});
    // A backward inside a backward, as reentrant checkpoints run it.
    ReadyHook nested(tensors[1], [&, depth = 0](const at::Tensor&) mutable {
      if (depth++ == 0) backward(lossOf(tensors, {1}, 1));
    });
    const std::string error = errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); });
    EXPECT_NE(error.find("parameter 'p1' got its gradient twice"), std::string::npos) << error;
  });
}

TEST(GradReducer, AGradientWhileAnExplicitRoundIsOpenIsRefusedByName) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {});
    reducer->setRequireSync(false);
    backward(lossOf(tensors, {0, 1}, 2 * self.rank));
    for (const bool requireSync : {false, true}) {
      reducer->startSync();
      reducer->setRequireSync(requireSync);
      const std::string error = errorOf([&] { backward(lossOf(tensors, {1}, 1)); });
      EXPECT_NE(error.find("parameter 'p1' got a gradient between start_grad_sync() and finish_grad_sync()"),
                std::string::npos)
          << error;
      reducer->finishSync();
      EXPECT_TRUE(isEverywhere(tensors[0].grad(), 1));
    }
    for (at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
    backward(lossOf(tensors, {0, 1}, 2 * self.rank));
    for (const at::Tensor& tensor : tensors) EXPECT_TRUE(isEverywhere(tensor.grad(), 1));
  });
}

TEST(GradReducer, WhatARoundWithoutGradientsLeftIsForgottenToo) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors),
                                       {.home = Gradients::Home::kMainGrad, .endsWithBackward = false});
    reducer->zeroGrads();
    if (self.rank == 1) {
      reducer->setRequireSync(false);
      backward(lossOf(tensors, {0}, 1));
    }
    reducer->finishSync();
    reducer->forgetGrads();
    reducer->setRequireSync(true);
    backward(lossOf(tensors, {0}, 1));
    reducer->finishSync();
    EXPECT_TRUE(isEverywhere(reducer->buffers()->mainGrads()[0], 1));
  });
}

TEST(GradReducer, HooksEndWithTheReducer) {
  runThreads(1, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {});
    const at::Tensor mainGrad = reducer->buffers()->mainGrads()[0];
    reducer.reset();
    backward(lossOf(tensors, {0}, 1));
    EXPECT_FALSE(tensors[0].grad().is_same(mainGrad));
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 1));
  });
}

TEST(GradReducer, FrozenParametersAreBroadcastButHaveNoGradient) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), at::full({5}, self.rank, at::kDouble), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {});
    EXPECT_EQ(reducer->buffers()->parameters().size(), 2U);
    EXPECT_TRUE(isEverywhere(tensors[1], 0));
    backward(lossOf(tensors, {0, 1, 2}, self.rank));
    EXPECT_TRUE(isEverywhere(tensors[2].grad(), 0.5));
    EXPECT_FALSE(tensors[1].grad().defined());
  });
}

TEST(GradReducer, WhatOneRankCannotDoIsRefusedOnAll) {
  auto errorsOf = [](const std::function<Model(int rank)>& make, ReducerOptions bad = {}) {
    std::vector<std::string> errors(2);
    runThreads(2, [&](ThreadRank& self) {
      errors[self.rank] =
          errorOf([&] { GradReducer::create(self.group, make(self.rank), self.rank == 1 ? bad : ReducerOptions{}); });
    });
    EXPECT_EQ(errors[0], errors[1]);
    return errors[0];
  };
  auto good = [](int) { return modelOf({parameter(3)}); };
  EXPECT_NE(errorsOf([&](int rank) {
              return rank == 0 ? good(0) : Model{};
            }).find("rank 1: the module has no parameter that requires a gradient"),
            std::string::npos);
  EXPECT_NE(errorsOf(good, {.buffers = {.bucketSize = 0}}).find("rank 1: bucket_size=0: expected at least 1"),
            std::string::npos);
  EXPECT_NE(errorsOf(good, {.buffers = {.bucketSize = 7}})
                .find("rank 0 has bucket_size: 40000000; rank 1 has bucket_size: 7"),
            std::string::npos);
  EXPECT_NE(errorsOf([&](int rank) {
              return rank == 0 ? good(0) : modelOf({at::empty({3}, at::device(at::kMeta)).set_requires_grad(true)});
            }).find("rank 1: parameter 'p0' is on meta"),
            std::string::npos);
}

}  // namespace
}  // namespace farandole::ddp
