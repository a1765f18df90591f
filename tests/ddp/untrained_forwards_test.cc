// Forwards whose outputs need no gradient, of which ranks had unlike numbers.

#include <gtest/gtest.h>

#include "ddp/grad_reducer.h"
#include "ddp/round_trouble.h"
#include "tests/ddp/reducer_models.h"
#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

constexpr const char* kUnlike =
    "rank 1 of the group had 1, rank 2 had 2, all others 0 forwards since the backward before";

std::shared_ptr<GradReducer> reducerOf(ThreadRank& self, const std::vector<at::Tensor>& tensors) {
  return GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}});
}

void noteUntrained(GradReducer& reducer, int times) {
  for (int i = 0; i < times; ++i) reducer.noteUntrained();
}

TEST(UntrainedForwards, UnlikeNumbersOfThemAreOneErrorOnAllRanks) {
  runThreads(4, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    const auto reducer = reducerOf(self, tensors);
    const auto round = [&] { return errorOf([&] { backward(lossOf(tensors, {0, 1}, self.rank)); }); };
    for (const int times : {0, 3, 0}) {
      noteUntrained(*reducer, times);
      EXPECT_EQ(round(), "");
    }
    noteUntrained(*reducer, self.rank == 3 ? 0 : self.rank);
    const std::string error = round();
    EXPECT_NE(error.find(kUnlike), std::string::npos) << error;
    EXPECT_EQ(round(), "") << "they are counted from the round on";
  });
}

TEST(UntrainedForwards, WhatElseIsWrongIsToldInTheirPlace) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    const auto reducer = reducerOf(self, tensors);
    noteUntrained(*reducer, self.rank);
    const std::string error =
        errorOf([&] { backward(lossOf(tensors, self.rank == 0 ? std::vector<size_t>{0} : allOf(tensors), 1)); });
    EXPECT_NE(error.find("rank 0 of the group: 1 of 2 parameters got no gradient"), std::string::npos) << error;
    EXPECT_EQ(errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); }), "");
  });
}

TEST(UntrainedForwards, ARoundThatACallMakesComparesNone) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    const auto reducer = reducerOf(self, tensors);
    for (const int caller : {0, 1}) {
      noteUntrained(*reducer, self.rank == caller ? 1 : 0);
      if (self.rank == caller) {  // instead of the backward that nothing comes of
        reducer->startSync();
        EXPECT_EQ(errorOf([&] { reducer->finishSync(); }), "");
      } else {
        EXPECT_EQ(errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); }), "");
      }
      noteUntrained(*reducer, self.rank == caller ? 1 : 0);
      if (self.rank == caller) reducer->setRequireSync(true);  // whose caller says when rounds are
      EXPECT_EQ(errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); }), "");
      noteUntrained(*reducer, 1);
      if (self.rank == caller) {
        reducer->shadowRound();
        reducer->setRequireSync(true);
      } else {
        EXPECT_EQ(errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); }), "");
      }
    }
  });
}

TEST(UntrainedForwards, OfOtherOptimizerInstancesAreComparedToo) {
  runGrid(2, 2, [](int rank, ThreadRank& row, ThreadRank& column) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    const Replicas replicas{row.group, column.group};
    const auto reducer = GradReducer::create({replicas, replicas}, modelOf(tensors), {});
    noteUntrained(*reducer, rank == 3 ? 1 : 0);
    const std::string error = errorOf([&] { backward(lossOf(tensors, {0, 1}, 1)); });
    const std::string told = rank < 2 ? "a rank of another optimizer instance had 1, all others 0"
                                      : "rank 1 of the group had 1, all others 0";
    EXPECT_NE(error.find(told), std::string::npos) << error;
  });
}

TEST(UntrainedForwards, OutputsTellWhetherABackwardCanCome) {
  runThreads(1, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    const auto reducer = reducerOf(self, tensors);
    const at::Tensor plain = at::ones({3});
    EXPECT_TRUE(reducer->watchOutputs({plain, tensors[0] * 2}));
    EXPECT_TRUE(reducer->watchOutputs({tensors[0]})) << "a parameter itself";
    EXPECT_FALSE(reducer->watchOutputs({plain, at::Tensor(), tensors[0].detach()}));
    EXPECT_FALSE(reducer->watchOutputs({}));
  });
}

TEST(UntrainedForwards, ManyRanksAreNotAllNamed) {
  const std::vector<std::optional<int>> byRank(100, 1);
  const std::string text = describeUntrained(byRank, 1, 0);
  EXPECT_NE(text.find("rank 0 of the group had 1, rank 1 had 1,"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 19 had 1 and 80 more had some, all others 0"), std::string::npos) << text;
}

}  // namespace
}  // namespace farandole::ddp
