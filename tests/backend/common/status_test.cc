#include "backend/common/status.h"

#include <gtest/gtest.h>

namespace farandole {
namespace {

TEST(Status, WrappedErrorKeepsItsCodeAndPrintsTheWholeChain) {
  Status inner = Status::timeout("no answer after 5 ms");
  Status outer = inner.wrap("recv from rank 1").wrap("batch 'step 7'");
  EXPECT_EQ(outer.code(), StatusCode::kTimeout);
  EXPECT_EQ(outer.toString(), "batch 'step 7': recv from rank 1: no answer after 5 ms");
}

TEST(Status, OkHasNoMessageAndIsTrue) {
  EXPECT_TRUE(Status::ok());
  EXPECT_EQ(Status().toString(), "ok");
}

TEST(Result, HoldsEitherAValueOrAnError) {
  Result<int> good = 3;
  Result<int> bad = Status::internal("broken");
  EXPECT_EQ(*good, 3);
  EXPECT_FALSE(bad);
  EXPECT_EQ(bad.status().message(), "broken");
}

}  // namespace
}  // namespace farandole
