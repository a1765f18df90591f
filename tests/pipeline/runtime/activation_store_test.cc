#include "pipeline/runtime/activation_store.h"

#include <gtest/gtest.h>

namespace farandole::pipeline {
namespace {

const TensorMeta kMeta{{3, 4}, at::kFloat, true};

TEST(ActivationStore, HandsOutABufferAgainOnceItIsFree) {
  ActivationStore store;
  at::Tensor buffer = store.take(kMeta, at::kCPU);
  EXPECT_EQ(buffer.sizes(), at::IntArrayRef({3, 4}));
  EXPECT_FALSE(buffer.requires_grad());
  const void* data = buffer.data_ptr();
  store.give(std::move(buffer));
  EXPECT_EQ(store.take(kMeta, at::kCPU).data_ptr(), data);
}

TEST(ActivationStore, NeverHandsOutWhatSomebodyStillHolds) {
  ActivationStore store;
  at::Tensor buffer = store.take(kMeta, at::kCPU);
  const at::Tensor alias = buffer.detach().view({12});
  const at::Tensor other = buffer;
  store.give(std::move(buffer));
  EXPECT_NE(store.take(kMeta, at::kCPU).data_ptr(), alias.data_ptr());
  EXPECT_EQ(store.size(), 0u);
}

TEST(ActivationStore, GivesOnlyWhatFitsInSizeAndDtype) {
  ActivationStore store;
  store.give(store.take(kMeta, at::kCPU));
  EXPECT_EQ(store.take({{4, 3}, at::kFloat, false}, at::kCPU).sizes(), at::IntArrayRef({4, 3}));
  EXPECT_EQ(store.take({{3, 4}, at::kDouble, false}, at::kCPU).scalar_type(), at::kDouble);
  EXPECT_EQ(store.size(), 1u);
}

}  // namespace
}  // namespace farandole::pipeline
