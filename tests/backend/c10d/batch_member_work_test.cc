#include "backend/c10d/batch_member_work.h"

#include <gtest/gtest.h>

namespace farandole::backend {
namespace {

// Remembers how it was waited for.
class Waited final : public ::c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { return note("wait"); }
  void synchronize() override { note("synchronize"); }
  // NOLINTNEXTLINE(modernize-use-override)
  virtual void blockCurrentStream() { note("blockCurrentStream"); }
  bool note(const char* how) {
    text += std::string(how) + " ";
    return true;
  }
  std::string text;
};

TEST(BatchMemberWork, WhoWaitsForItWaitsForTheBatch) {
  const auto batch = c10::make_intrusive<Waited>();
  const auto member = c10::make_intrusive<BatchMemberWork>(0, [] { FAIL(); });
  member->setBatch(batch);
  EXPECT_TRUE(member->wait());
  member->synchronize();
  member->blockCurrentStream();
  // torch 2.11 has no blockCurrentStream() that could be overridden.
  const auto hasBlock = []<typename W>(const W*) { return requires(W& work) { work.blockCurrentStream(); }; };
  EXPECT_EQ(batch->text, hasBlock(static_cast<const ::c10d::Work*>(nullptr)) ? "wait synchronize blockCurrentStream " : "wait synchronize synchronize ");
}

TEST(BatchMemberWork, WhoWaitsForItBeforeTheBatchIsEndedDropsIt) {
  int drops = 0;
  const auto member = c10::make_intrusive<BatchMemberWork>(0, [&] { ++drops; });
  EXPECT_THROW(member->wait(), c10::Error);
  EXPECT_THROW(member->synchronize(), c10::Error);
  EXPECT_THROW(member->blockCurrentStream(), c10::Error);
  EXPECT_EQ(drops, 3);
}

}  // namespace
}  // namespace farandole::backend
