#include "ddp/untold_trouble.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "ddp/grad_reducer.h"
#include "tests/ddp/reducer_models.h"
#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

using std::chrono::milliseconds;

std::string warningsOf(const std::function<void()>& body) {
  testing::internal::CaptureStderr();
  body();
  return testing::internal::GetCapturedStderr();
}

TEST(UntoldTrouble, WarnsOnceWhereTheWaitIsLong) {
  const auto wait = [](const char* trouble, milliseconds patience, milliseconds taken) {
    return warningsOf([&] {
      const UntoldTrouble untold(trouble, patience);
      std::this_thread::sleep_for(taken);
    });
  };
  const std::string warned = wait("rank 3: it is broken", milliseconds(10), milliseconds(500));
  EXPECT_NE(warned.find("rank 3: it is broken"), std::string::npos) << warned;
  EXPECT_EQ(warned.find("rank 3"), warned.rfind("rank 3")) << warned;
  EXPECT_EQ(wait("rank 3: it is broken", milliseconds(10000), milliseconds(10)), "");
  EXPECT_EQ(wait("", milliseconds(1), milliseconds(100)), "");
}

TEST(UntoldTrouble, IsBesideWhatTheWaitHasFailedWith) {
  const auto failure = std::make_exception_ptr(std::runtime_error("the wire broke"));
  EXPECT_EQ(
      errorOf([&] { UntoldTrouble("rank 3: it is broken").throwWith(failure); }),
      "farandole.ddp: rank 3: it is broken\nThe other ranks could not be told: the wait for them failed: the wire "
      "broke");
  EXPECT_THROW(UntoldTrouble("").throwWith(failure), std::runtime_error);
}

TEST(UntoldTrouble, OfARoundThatNobodyElseComesToIsInItsError) {
  std::string warned;
  runThreads(2, [&warned](ThreadRank& self) {
    std::vector<at::Tensor> tensors = {parameter(10), parameter(20)};
    auto reducer = GradReducer::create(self.group, modelOf(tensors), {});
    if (self.rank == 0) return;
    std::string error;
    warned = warningsOf([&] { error = errorOf([&] { reducer->failRound("a parameter was read too early"); }); });
    EXPECT_NE(error.find("rank 1 of the group: a parameter was read too early\n"), std::string::npos) << error;
    EXPECT_NE(error.find("ranks never came"), std::string::npos) << error;
  });
  EXPECT_NE(warned.find("rank 1 of the group: a parameter was read too early"), std::string::npos) << warned;
  EXPECT_EQ(warned.find("too early"), warned.rfind("too early")) << warned;
}

}  // namespace
}  // namespace farandole::ddp
