#include "ddp/param_gather.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

std::shared_ptr<ModelBuffers> buffersOf(const ThreadRank& self, const std::vector<at::Tensor>& tensors) {
  Model model;
  for (const at::Tensor& tensor : tensors) model.parameters.push_back({"p", tensor});
  return std::make_shared<ModelBuffers>(model, DataParallelGroups(self.group),
                                        BufferOptions{.bucketSize = 1, .sharded = true});
}

std::vector<at::Tensor> parameters() {
  std::vector<at::Tensor> tensors;
  for (int64_t numel : {100, 300, 500}) tensors.push_back(at::zeros({numel}).set_requires_grad(true));
  return tensors;
}

// As an optimizer does: this rank's part of each bucket becomes 10 * rank + bucket.
void update(ModelBuffers& buffers, const ThreadRank& self) {
  for (int bucket = 0; bucket < 3; ++bucket) {
    buffers.parametersOf(bucket).chunk(2)[self.rank].fill_(10 * self.rank + bucket);
  }
}

bool isWhole(const ModelBuffers& buffers, int bucket) {
  const std::vector<at::Tensor> parts = buffers.parametersOf(bucket).chunk(2);
  return parts[0].eq(bucket).all().item<bool>() && parts[1].eq(10 + bucket).all().item<bool>();
}

TEST(ParamGather, StartsGroupsInTheOrderOfAForwardWhateverIsNeededFirst) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    runThreads(2, [&](ThreadRank& self) {
      const std::vector<at::Tensor> tensors = parameters();
      const auto buffers = buffersOf(self, tensors);
      ParamGather gather(self.group, buffers);
      EXPECT_TRUE(gather.isCurrent());
      for (int step = 0; step < 2; ++step) {
        update(*buffers, self);
        gather.markStale();
        EXPECT_FALSE(gather.isCurrent());
        self.backend->events.clear();
        std::vector<int> order = {0, 1, 2};
        std::mt19937_64 random(2 * seed + self.rank);  // ranks differ
        std::shuffle(order.begin(), order.end(), random);
        for (size_t i = 0; i < order.size(); ++i) {
          const bool isLate = *std::max_element(order.begin() + i, order.end()) != order[i];
          EXPECT_EQ(gather.finish({order[i]}), isLate);
          EXPECT_TRUE(isWhole(*buffers, order[i]));
          EXPECT_FALSE(gather.finish({order[i]}));
        }
        EXPECT_TRUE(gather.isCurrent());
        std::vector<std::string> started;
        std::copy_if(self.backend->events.begin(), self.backend->events.end(), std::back_inserter(started),
                     [](const std::string& event) { return event != "wait"; });
        EXPECT_EQ(started, (std::vector<std::string>{"allgather 128", "allgather 384", "allgather 512"}));
      }
    });
  }
}

TEST(ParamGather, ParametersAreKnownByTheirGroups) {
  runThreads(2, [](ThreadRank& self) {
    const std::vector<at::Tensor> tensors = parameters();
    const auto buffers = buffersOf(self, tensors);
    EXPECT_EQ(ParamGather(self.group, buffers).bucketGroupOf(), (std::vector<int>{2, 1, 0}));
  });
}

TEST(ParamGather, AllAreStartedAtOnceAndNothingChangesMeanwhile) {
  runThreads(2, [](ThreadRank& self) {
    const std::vector<at::Tensor> tensors = parameters();
    const auto buffers = buffersOf(self, tensors);
    ParamGather gather(self.group, buffers);
    update(*buffers, self);
    gather.markStale();
    gather.start();
    gather.start();
    EXPECT_EQ(self.backend->events.size(), 3U);
    EXPECT_THROW(gather.markStale(), c10::Error);
    gather.finishAll();
    for (int bucket = 0; bucket < 3; ++bucket) EXPECT_TRUE(isWhole(*buffers, bucket));
    EXPECT_TRUE(gather.isCurrent());
    gather.finishAll();
    EXPECT_EQ(self.backend->events.size(), 6U);
  });
}

TEST(ParamGather, WhatIsUpdatedFirstLeavesFirst) {
  runThreads(2, [](ThreadRank& self) {
    const std::vector<at::Tensor> tensors = parameters();
    const auto buffers = buffersOf(self, tensors);
    ParamGather gather(self.group, buffers);
    for (int step = 0; step < 2; ++step) {
      gather.markStale();
      self.backend->events.clear();
      for (int bucket = 3; bucket-- > 0;) {
        buffers->parametersOf(bucket).chunk(2)[self.rank].fill_(10 * self.rank + bucket);
        gather.startThrough(bucket);
        EXPECT_EQ(self.backend->events.size(), 3U - bucket);
      }
      gather.startThrough(1);
      EXPECT_EQ(self.backend->events.size(), 3U);
      gather.finishAll();
      for (int bucket = 0; bucket < 3; ++bucket) EXPECT_TRUE(isWhole(*buffers, bucket));
    }
  });
}

TEST(ParamGather, WhatCouldNotBeStartedIsStartedNextTime) {
  for (int failing = 0; failing < 3; ++failing) {
    SCOPED_TRACE("all-gather " + std::to_string(failing));
    runThreads(2, [&](ThreadRank& self) {
      const std::vector<at::Tensor> tensors = parameters();
      const auto buffers = buffersOf(self, tensors);
      ParamGather gather(self.group, buffers);
      update(*buffers, self);
      gather.markStale();
      self.backend->failingGather = failing;
      EXPECT_THROW(gather.start(), c10::Error);
      EXPECT_FALSE(gather.isCurrent());
      gather.finishAll();
      EXPECT_TRUE(gather.isCurrent());
      for (int bucket = 0; bucket < 3; ++bucket) EXPECT_TRUE(isWhole(*buffers, bucket));
      const std::vector<std::string>& events = self.backend->events;
      EXPECT_EQ(events.size() - std::count(events.begin(), events.end(), "wait"), 3);
    });
  }
}

TEST(ParamGather, ARankByItselfHasNothingToGather) {
  runThreads(1, [](ThreadRank& self) {
    const std::vector<at::Tensor> tensors = parameters();
    const auto buffers = buffersOf(self, tensors);
    ParamGather gather(self.group, buffers);
    gather.markStale();
    gather.finishAll();
    EXPECT_TRUE(gather.isCurrent());
    EXPECT_TRUE(self.backend->events.empty());
  });
}

}  // namespace
}  // namespace farandole::ddp
