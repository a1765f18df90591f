#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ddp/grad_reducer.h"
#include "ddp/ready_hook.h"
#include "tests/ddp/reducer_models.h"
#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

TEST(GradReducer, MainGradsOfAnotherTypeTakeWhatIsAddedAndLeaveGradEmpty) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {at::ones({10}, at::kBFloat16).set_requires_grad(true)};
    auto reducer = GradReducer::create(
        self.group, modelOf(tensors),
        {.buffers = {.gradType = at::kFloat}, .home = Gradients::Home::kMainGrad, .endsWithBackward = false});
    const at::Tensor& mainGrad = reducer->buffers()->mainGrads()[0];
    for (int step = 0; step < 3; ++step) {
      step == 1 ? reducer->forgetGrads() : reducer->zeroGrads();
      reducer->setRequireSync(false);
      backward(lossOf(tensors, {0}, 256));
      reducer->setRequireSync(true);
      backward(lossOf(tensors, {0}, 1 + self.rank));
      EXPECT_FALSE(tensors[0].grad().defined());
      reducer->finishSync();
      reducer->finishSync();  // once for a step
      EXPECT_TRUE(isEverywhere(mainGrad, 257.5)) << "a bfloat16 has no such value";
    }
    reducer->scaleGrads(2);
    EXPECT_TRUE(isEverywhere(mainGrad, 515));
  });
}

TEST(GradReducer, WhatAKernelHasAddedToMainGradIsNotAddedAgain) {
  runThreads(1, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.home = Gradients::Home::kMainGrad},
                                       [](int p) { return p == 0; });
    reducer->buffers()->mainGrads()[0].fill_(5);
    backward(lossOf(tensors, {0, 1}, 3));
    EXPECT_TRUE(isEverywhere(reducer->buffers()->mainGrads()[0], 5));
    EXPECT_TRUE(isEverywhere(reducer->buffers()->mainGrads()[1], 3));
    reducer->forgetGrads();
    EXPECT_NE(errorOf([&] {
                backward(lossOf(tensors, {0, 1}, 3));
              }).find("call zero_grad_buffer()"),
              std::string::npos);
  });
}

TEST(GradReducer, WithoutOverlapNothingIsIssuedBeforeTheEnd) {
  for (const bool endsWithBackward : {false, true}) {
    runThreads(2, [&](ThreadRank& self) {
      std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
      auto reducer =
          GradReducer::create(self.group, modelOf(tensors),
                              {.buffers = {.bucketSize = 1}, .overlaps = false, .endsWithBackward = endsWithBackward});
      ReadyHook observer(tensors[0], [&self](const at::Tensor&) { self.backend->events.emplace_back("last"); });
      self.backend->events.clear();
      backward(lossOf(tensors, {0, 1}, self.rank));
      EXPECT_EQ(self.backend->events.front(), "last");
      EXPECT_EQ(self.backend->events.size() > 1, endsWithBackward);
      if (!endsWithBackward) reducer->finishSync();
      for (const at::Tensor& tensor : tensors) EXPECT_TRUE(isEverywhere(tensor.grad(), 0.5));
    });
  }
}

TEST(GradReducer, ABackwardThatACallEndsIssuesAsEverAndLeavesTheWaitToTheCall) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}});
    EXPECT_NE(errorOf([&] { reducer->finishBackward(); }).find("manual_backward_finalization=True"), std::string::npos);
    reducer->requireManualEnd(true);
    for (int step = 0; step < 3; ++step) {
      reducer->prepareForward(true);
      self.backend->events.clear();
      backward(lossOf(tensors, {0, 1}, self.rank + step));
      EXPECT_TRUE(reducer->isInRound());
      EXPECT_FALSE(self.backend->events.empty());
      EXPECT_NE(errorOf([&] { reducer->requireManualEnd(false); }).find("while gradients are reduced"),
                std::string::npos);
      reducer->finishBackward();
      EXPECT_FALSE(reducer->isInRound());
      for (at::Tensor& tensor : tensors) {
        EXPECT_TRUE(isEverywhere(tensor.grad(), 0.5 + step));
        tensor.mutable_grad().reset();
      }
      reducer->forgetGrads();
    }
    EXPECT_NE(errorOf([&] { reducer->finishBackward(); }).find("without gradients"), std::string::npos);
    reducer->requireManualEnd(false);
    backward(lossOf(tensors, {0, 1}, self.rank));
    EXPECT_FALSE(reducer->isInRound());
  });
}

TEST(GradReducer, WhereShardedEachRankHasTheAverageOfItsPartAndParametersLieInBuffers) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(100, 7), parameter(300, 8)};
    auto reducer = GradReducer::create(
        self.group, modelOf(tensors),
        {.buffers = {.sharded = true}, .home = Gradients::Home::kMainGrad, .endsWithBackward = false});
    const ModelBuffers& buffers = *reducer->buffers();
    EXPECT_TRUE(isEverywhere(tensors[0], 7));
    EXPECT_TRUE(tensors[0].is_alias_of(buffers.parametersOf(0)));
    reducer->zeroGrads();
    backward(lossOf(tensors, {0, 1}, self.rank));
    reducer->finishSync();
    const at::Tensor part = buffers.gradsOf(0).chunk(2)[self.rank];
    const at::Tensor data = buffers.parametersOf(0).chunk(2)[self.rank];
    EXPECT_TRUE(at::equal(part != 0, data != 0)) << "all but the padding";
    EXPECT_TRUE(part.eq(0.5).logical_or(part.eq(0)).all().item<bool>());
    if (self.rank == 0) reducer->zeroGrads();
    backward(lossOf(tensors, {0, 1}, 1));
    const std::string error = errorOf([&] { reducer->finishSync(); });
    EXPECT_NE(error.find("rank 1 of the group: parameter 'p"), std::string::npos) << error;
    EXPECT_NE(error.find("gradients of the step before are still there"), std::string::npos) << error;
  });
}

TEST(GradReducer, AGroupOfBucketsMayBeUnusedForGoodWhereThatIsAllowed) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20), parameter(30)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors),
                                       {.buffers = {.bucketSize = 1}, .unused = UnusedParameters::kErrorInUsedGroup});
    const auto some = self.rank == 0 ? std::vector<size_t>{0, 1} : std::vector<size_t>{1};
    for (int round = 1; round <= 3; ++round) {
      backward(lossOf(tensors, some, 2));
      EXPECT_TRUE(isEverywhere(tensors[1].grad(), 2 * round));
      EXPECT_TRUE(isEverywhere(tensors[2].grad(), 0));
    }
    const std::string error = errorOf([&] { backward(lossOf(tensors, {1, 2}, 2)); });
    EXPECT_NE(error.find("rank 0 of the group: 1 of 3 parameters got no gradient"), std::string::npos) << error;
    EXPECT_NE(error.find("'p0'"), std::string::npos) << error;
    EXPECT_EQ(error.find("rank 1"), std::string::npos) << "it has never used the first: " << error;
  });
}

TEST(GradReducer, WhatIsSkippedKeepsItsGradientUnlessAnotherRankHasOne) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20), parameter(30)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.unused = UnusedParameters::kSkip});
    backward(lossOf(tensors, self.rank == 0 ? std::vector<size_t>{0} : std::vector<size_t>{0, 1}, 2));
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 2));
    EXPECT_TRUE(isEverywhere(tensors[1].grad(), 1));
    EXPECT_FALSE(tensors[2].grad().defined());
  });
}

TEST(GradReducer, WhatAccumulatedInARoundThatDidNotSynchronizeIsNotSkipped) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20), parameter(30)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.unused = UnusedParameters::kSkip});
    reducer->setRequireSync(false);
    backward(lossOf(tensors, self.rank == 0 ? std::vector<size_t>{0} : std::vector<size_t>{0, 1}, 2));
    reducer->setRequireSync(true);
    backward(lossOf(tensors, {0}, 2));
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 4));
    EXPECT_TRUE(isEverywhere(tensors[1].grad(), 1));
    EXPECT_FALSE(tensors[2].grad().defined());
  });
}

TEST(GradReducer, WhatIsSkippedIsNotSummedAgain) {
  runThreads(2, [](ThreadRank& self) {
    for (const Gradients::Home home : {Gradients::Home::kGrad, Gradients::Home::kMainGrad}) {
      std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
      auto reducer = GradReducer::create(self.group, modelOf(tensors),
                                         {.home = home, .unused = UnusedParameters::kSkip, .isAveraged = false});
      backward(lossOf(tensors, {0, 1}, 1));
      reducer->forgetSomeGrads({0}, false);
      backward(lossOf(tensors, {0}, 0));
      EXPECT_TRUE(isEverywhere(reducer->buffers()->mainGrads()[1], 2));
    }
  });
}

constexpr Gradients::Home kHomes[] = {Gradients::Home::kGrad, Gradients::Home::kBucketView, Gradients::Home::kMainGrad};

TEST(GradReducer, ASumOverTheRanksIsNotAddedToBeforeItIsResetOnAnyRank) {
  for (const Gradients::Home home : kHomes) {
    runThreads(2, [home](ThreadRank& self) {
      std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
      auto reducer = GradReducer::create(self.group, modelOf(tensors),
                                         {.buffers = {.bucketSize = 1}, .home = home, .isAveraged = false});
      const auto& grads = reducer->buffers()->mainGrads();
      const auto expectSums = [&] {
        backward(lossOf(tensors, {0, 1}, self.rank + 1));
        for (const at::Tensor& grad : grads) EXPECT_TRUE(isEverywhere(grad, 3));
      };
      expectSums();
      // Rank 1 alone has forgotten to.
      if (self.rank == 0) reducer->forgetSomeGrads({0, 1}, false);
      const std::string error = errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); });
      EXPECT_NE(error.find("rank 1 of the group: parameter 'p1' gets a gradient while the gradients of the step before "
                           "are still there, which would be summed over the ranks once more: call zero_grad()"),
                std::string::npos)
          << error;
      EXPECT_EQ(error.find("rank 0"), std::string::npos) << error;
      // Whatever resets them.
      reducer->zeroGrads();
      expectSums();
      reducer->forgetGrads();
      expectSums();
      reducer->forgetSomeGrads({0, 1}, true);
      expectSums();
      for (const at::Tensor& grad : grads) grad.detach().zero_();
      expectSums();
      if (home != Gradients::Home::kMainGrad) {
        for (at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
        expectSums();
      }
      reducer->forgetGrads();
      reducer->setRequireSync(false);
      backward(lossOf(tensors, {0, 1}, 1));
      reducer->setRequireSync(true);
      backward(lossOf(tensors, {0, 1}, self.rank));
      for (const at::Tensor& grad : grads) EXPECT_TRUE(isEverywhere(grad, 3)) << "what accumulates is no sum yet";
    });
  }
}

TEST(GradReducer, ASumThatIsLeftIsNotReducedAgainWithAParameterThatGetsNothing) {
  for (const Gradients::Home home : kHomes) {
    runThreads(2, [home](ThreadRank& self) {
      std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
      auto reducer = GradReducer::create(self.group, modelOf(tensors),
                                         {.home = home, .unused = UnusedParameters::kZeroFill, .isAveraged = false});
      backward(lossOf(tensors, {0, 1}, 1));
      reducer->forgetSomeGrads({0}, false);
      const std::string error = errorOf([&] { backward(lossOf(tensors, {0}, 1)); });
      EXPECT_NE(error.find("parameter 'p1' gets a gradient while"), std::string::npos) << error;
      reducer->forgetGrads();
      backward(lossOf(tensors, {0}, 1));
      EXPECT_TRUE(isEverywhere(reducer->buffers()->mainGrads()[0], 2));
      EXPECT_TRUE(isEverywhere(reducer->buffers()->mainGrads()[1], 0));
    });
  }
}

TEST(GradReducer, AnAverageMayBeAddedToAsWithTorchsDdp) {
  for (const Gradients::Home home : kHomes) {
    runThreads(2, [home](ThreadRank& self) {
      std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
      auto reducer = GradReducer::create(self.group, modelOf(tensors), {.home = home});
      for (int times = 1; times <= 3; ++times) {
        backward(lossOf(tensors, {0, 1}, self.rank + 1));
        for (const at::Tensor& grad : reducer->buffers()->mainGrads()) EXPECT_TRUE(isEverywhere(grad, 1.5 * times));
      }
    });
  }
}

TEST(GradReducer, ExpertsThatHaveFewerReplicasAreNoAverageToBeAddedTo) {
  runGrid(2, 2, [](int rank, ThreadRank& row, ThreadRank& column) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    Model model = modelOf(tensors);
    model.parameters[1].isExpert = true;
    auto reducer = GradReducer::create({{row.group, column.group}, {column.group, nullptr}}, model, {});
    backward(lossOf(tensors, {0, 1}, rank + 1));
    const std::string error = errorOf([&] { backward(lossOf(tensors, {0, 1}, rank + 1)); });
    EXPECT_NE(error.find("parameter 'p1' gets a gradient while"), std::string::npos) << error;
    EXPECT_EQ(error.find("'p0'"), std::string::npos) << error;
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 5));
  });
}

TEST(GradReducer, AStaticGraphCountsInTheFirstBackwardThatComesToItsEnd) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.isGraphStatic = true});
    bool isNested = false;
    bool fails = true;
    ReadyHook nested(tensors[1], [&](const at::Tensor&) {
      TORCH_CHECK(!fails, "too much");
      if (!std::exchange(isNested, true)) backward(lossOf(tensors, {1}, 10.0 * self.rank));
    });
    reducer->startSync();  // without a backward
    reducer->finishSync();
    EXPECT_NE(errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); }), "");
    EXPECT_NE(errorOf([&] { reducer->prepareForward(true); }), "");
    fails = false;
    for (int round = 0; round < 3; ++round) {
      for (at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
      isNested = false;
      reducer->prepareForward(true);
      backward(lossOf(tensors, {0, 1}, self.rank));
      EXPECT_TRUE(isEverywhere(tensors[0].grad(), 0.5));
      EXPECT_TRUE(isEverywhere(tensors[1].grad(), 5.5));
    }
  });
}

TEST(GradReducer, AStaticGraphMayGiveAParameterSeveralGradientsInABackward) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer =
        GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}, .isGraphStatic = true});
    bool isNested = false;
    ReadyHook nested(tensors[1], [&](const at::Tensor&) {
      if (!std::exchange(isNested, true)) backward(lossOf(tensors, {1}, 10.0 * self.rank));
    });
    for (int round = 0; round < 3; ++round) {
      for (at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
      isNested = false;
      backward(lossOf(tensors, {0, 1}, self.rank));
      EXPECT_TRUE(isEverywhere(tensors[0].grad(), 0.5));
      EXPECT_TRUE(isEverywhere(tensors[1].grad(), 5.5));
    }
  });
}

TEST(GradReducer, ChecksNameParameterBucketAndRankOnEveryRankAndTheNextRoundWorks) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const double bad : {std::nan(""), inf, 1e6}) {
    runThreads(2, [&](ThreadRank& self) {
      std::vector<at::Tensor> tensors = {parameter(10), parameter(20), parameter(30)};
      auto reducer = GradReducer::create(self.group, modelOf(tensors),
                                         {.buffers = {.bucketSize = 1}, .checks = {.nan = true, .largest = 1e5}});
      at::Tensor loss = lossOf(tensors, {0, 1, 2}, 1);
      if (self.rank == 1) loss = loss + (tensors[1][3] * bad);
      const std::string error = errorOf([&] { backward(loss); });
      EXPECT_NE(error.find("rank 1 of the group: the gradient of parameter 'p1' (bucket 1) "), std::string::npos)
          << error;
      EXPECT_NE(error.find(std::isnan(bad)   ? "NaN"
                           : std::isinf(bad) ? "infinite"
                                             : "a norm of 1e+06"),
                std::string::npos)
          << error;
      for (at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
      backward(lossOf(tensors, {0, 1, 2}, 1));
      EXPECT_TRUE(isEverywhere(tensors[1].grad(), 1));
    });
  }
}

TEST(GradReducer, ExpertsAreAveragedOverTheirReplicasButScaledAsAll) {
  runGrid(2, 2, [](int rank, ThreadRank& row, ThreadRank& column) {
    // Two experts, one for each column, on two ranks each; the dense parameter is on all four.
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    Model model = modelOf(tensors);
    model.parameters[1].isExpert = true;
    auto reducer = GradReducer::create({{row.group, column.group}, {column.group, nullptr}}, model, {});
    EXPECT_EQ(reducer->buffers()->layout().buffers.size(), 2U);
    backward(lossOf(tensors, {0, 1}, rank + 1));
    EXPECT_TRUE(isEverywhere(tensors[0].grad(), 2.5));
    EXPECT_TRUE(isEverywhere(tensors[1].grad(), row.rank == 0 ? 1 : 1.5));  // (1 + 3) / 4 and (2 + 4) / 4
  });
}

TEST(GradReducer, ExpertsAndOthersThatShareAGroupAreIssuedInOneOrder) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(10)};
    Model model = modelOf(tensors);
    model.parameters[1].isExpert = true;
    auto reducer = GradReducer::create(self.group, model, {.buffers = {.bucketSize = 1}});
    for (int round = 0; round < 2; ++round) {
      for (at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
      // Gradients come in another order on each rank.
      const at::Tensor loss = self.rank == 0 ? (tensors[0] * 2).sum() + (tensors[1] * 8).sum()
                                             : (tensors[1] * 8).sum() + (tensors[0] * 2).sum();
      backward(loss);
      EXPECT_TRUE(isEverywhere(tensors[0].grad(), 2));
      EXPECT_TRUE(isEverywhere(tensors[1].grad(), 8));
    }
  });
}

}  // namespace
}  // namespace farandole::ddp
