#include <gtest/gtest.h>

#include "ddp/grad_reducer.h"
#include "tests/ddp/reducer_models.h"
#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

TEST(GradReducer, ARankWithoutInputsShadowsARoundAndKeepsItsGradients) {
  runThreads(3, [](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {.buffers = {.bucketSize = 1}});
    backward(lossOf(tensors, {0, 1}, 3.0 * self.rank));
    for (const int active : {3, 2}) {
      if (self.rank != 1) {
        for (at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
      }
      reducer->averageOver(active);
      if (self.rank == 1) {
        reducer->shadowRound();
      } else {
        backward(lossOf(tensors, {1, 0}, 3.0 * self.rank));
      }
      for (const at::Tensor& tensor : tensors)
        EXPECT_TRUE(isEverywhere(tensor.grad(), self.rank == 1 ? 3 : 6.0 / active));
    }
  });
}

}  // namespace
}  // namespace farandole::ddp
