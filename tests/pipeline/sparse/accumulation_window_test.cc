#include "pipeline/sparse/accumulation_window.h"

#include <gtest/gtest.h>

namespace farandole::pipeline::sparse {
namespace {

TEST(AccumulationWindow, OfOneIsFirstAndLastInEveryBatch) {
  AccumulationWindow window(1);
  for (int batch = 0; batch < 3; ++batch) {
    EXPECT_TRUE(window.isFirst());
    EXPECT_TRUE(window.isLast());
    window.add();
  }
  EXPECT_EQ(window.close(), 0);
}

TEST(AccumulationWindow, ZeroesBeforeItsFirstBatchAndStepsAfterItsLast) {
  AccumulationWindow window(3);
  for (int batch = 0; batch < 9; ++batch) {
    EXPECT_EQ(window.isFirst(), batch % 3 == 0) << batch;
    EXPECT_EQ(window.isLast(), batch % 3 == 2) << batch;
    EXPECT_EQ(window.filled(), batch % 3) << batch;
    window.add();
  }
}

TEST(AccumulationWindow, BeginsAnewAfterItWasClosed) {
  AccumulationWindow window(4);
  window.add();
  window.add();
  EXPECT_EQ(window.close(), 2);
  EXPECT_TRUE(window.isFirst());
  EXPECT_EQ(window.close(), 0);
}

}  // namespace
}  // namespace farandole::pipeline::sparse
