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

// torch 2.11 has no blockCurrentStream() that could be overridden.
template <typename W>
bool canBlockStreams(W* work) {
  if constexpr (requires { work->blockCurrentStream(); }) return true;
  return false;
}

TEST(BatchMemberWork, WhoWaitsForItWaitsForTheBatch) {
  const auto batch = c10::make_intrusive<Waited>();
  const auto ofBatch = std::make_shared<WorkOfBatch>([] { FAIL(); });
  const auto member = c10::make_intrusive<BatchMemberWork>(0, ofBatch, 0);
  ofBatch->set(batch);
  EXPECT_TRUE(member->wait());
  member->synchronize();
  member->blockCurrentStream();
  const char* const last =
      canBlockStreams(static_cast<::c10d::Work*>(batch.get())) ? "blockCurrentStream " : "synchronize ";
  EXPECT_EQ(batch->text, "wait synchronize " + std::string(last));
}

TEST(BatchMemberWork, WhoWaitsForItBeforeTheBatchIsEndedDropsIt) {
  int drops = 0;
  const auto member = c10::make_intrusive<BatchMemberWork>(0, std::make_shared<WorkOfBatch>([&] { ++drops; }), 0);
  EXPECT_THROW(member->wait(), c10::Error);
  EXPECT_THROW(member->synchronize(), c10::Error);
  EXPECT_THROW(member->blockCurrentStream(), c10::Error);
  EXPECT_EQ(drops, 3);
}

}  // namespace
}  // namespace farandole::backend
