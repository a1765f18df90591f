#include "ddp/reduction_cost.h"

#include <gtest/gtest.h>

#include <cmath>

namespace farandole::ddp {
namespace {

TEST(ReductionCost, IsOnLinesBetweenWhatWasMeasured) {
  const ReductionCost cost = *ReductionCost::fromMeasured({{10, 1}, {20, 2}, {40, 8}});
  EXPECT_DOUBLE_EQ(cost.seconds(0), 1);
  EXPECT_DOUBLE_EQ(cost.seconds(10), 1);
  EXPECT_DOUBLE_EQ(cost.seconds(15), 1.5);
  EXPECT_DOUBLE_EQ(cost.seconds(20), 2);
  EXPECT_DOUBLE_EQ(cost.seconds(30), 5);
  EXPECT_DOUBLE_EQ(cost.seconds(50), 11);
  EXPECT_DOUBLE_EQ(cost.latency(), 1);
  EXPECT_DOUBLE_EQ(cost.bytesPerSecond(), 30.0 / 7);
}

TEST(ReductionCost, MoreBytesNeverTakeLess) {
  const ReductionCost cost = *ReductionCost::fromMeasured({{10, 3}, {20, 2}, {40, 2.5}});
  EXPECT_DOUBLE_EQ(cost.seconds(100), 3);
  EXPECT_TRUE(std::isinf(cost.bytesPerSecond()));
  EXPECT_DOUBLE_EQ(ReductionCost::fromMeasured({{10, 3}})->seconds(1e9), 3);
}

TEST(ReductionCost, WhatCannotHaveBeenMeasuredIsRefused) {
  EXPECT_FALSE(ReductionCost::fromMeasured({}));
  EXPECT_FALSE(ReductionCost::fromMeasured({{10, 1}, {10, 2}}));
  EXPECT_FALSE(ReductionCost::fromMeasured({{10, -1}}));
  EXPECT_FALSE(ReductionCost::fromMeasured({{10, NAN}}));
}

}  // namespace
}  // namespace farandole::ddp
