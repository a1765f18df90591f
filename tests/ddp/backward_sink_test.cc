#include <gtest/gtest.h>

#include "ddp/grad_reducer.h"
#include "ddp/ready_hook.h"
#include "tests/ddp/reducer_models.h"
#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

TEST(GradReducer, ABackwardThatReachesAnOutputEndsTheRoundOfThoseInsideIt) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.unused = UnusedParameters::kSkip});
    const std::vector<at::Tensor> input = {parameter(5)};
    ReadyHook nested(input[0], [&](const at::Tensor&) { backward(lossOf(tensors, {1}, self.rank)); });
    const at::Tensor output = lossOf(input, {0}, 1);
    reducer->watchOutputs({output, at::Tensor(), at::ones(3)});
    backward(output);
    EXPECT_TRUE(isEverywhere(tensors[1].grad(), 0.5));
    EXPECT_FALSE(tensors[0].grad().defined());
    reducer->prepareForward(true);
  });
}

TEST(GradReducer, ABackwardThatReachesAnOutputInTheMidstOfARoundDoesNotEndIt) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {});
    const std::vector<at::Tensor> input = {parameter(5)};
    const at::Tensor other = lossOf(input, {0}, 1);
    const at::Tensor output = lossOf(tensors, {0, 1}, self.rank);
    reducer->watchOutputs({other, output});
    ReadyHook nested(tensors[1], [&](const at::Tensor&) { backward(other); });
    backward(output);
    for (const at::Tensor& tensor : tensors) EXPECT_TRUE(isEverywhere(tensor.grad(), 0.5));
  });
}

TEST(GradReducer, ABackwardInsideABackwardDoesNotEndTheRound) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20), parameter(30)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {});
    ReadyHook nested(tensors[2], [&](const at::Tensor&) { backward(lossOf(tensors, {1}, self.rank)); });
    backward(lossOf(tensors, {0, 2}, self.rank));
    for (const at::Tensor& tensor : tensors) EXPECT_TRUE(isEverywhere(tensor.grad(), 0.5));
  });
}

TEST(GradReducer, AParameterThatInnerBackwardsLeftOutIsNamedByTheNextForward) {
  runThreads(2, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}});
    // The outer backward reaches no parameter of the model: nothing in it can tell the end.
    const std::vector<at::Tensor> input = {parameter(5)};
    ReadyHook nested(input[0], [&](const at::Tensor&) { backward(lossOf(tensors, {1}, self.rank)); });
    backward(lossOf(input, {0}, 1));
    const std::string error = errorOf([&] { reducer->prepareForward(true); });
    EXPECT_NE(error.find("Without a gradient in it: 'p0'"), std::string::npos) << error;
    EXPECT_TRUE(isEverywhere(tensors[1].grad(), 0.5));
    reducer->prepareForward(true);
  });
}

}  // namespace
}  // namespace farandole::ddp
