#include "ddp/staging_memory.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

namespace farandole::ddp {
namespace {

TEST(StagingMemory, TakesABufferAgainOnceNobodyHasIt) {
  StagingMemory memory;
  at::Tensor one = memory.take(10'000);
  const at::Tensor view = one.slice(0, 5'000);
  const void* place = one.data_ptr();
  EXPECT_EQ(one.numel(), 10'000);
  one.reset();
  at::Tensor other = memory.take(100);
  EXPECT_NE(other.data_ptr(), place);  // of which there is a view
  EXPECT_EQ(view.numel(), 5'000);
}

TEST(StagingMemory, GivesTheSmallestThatFits) {
  StagingMemory memory;
  at::Tensor small = memory.take(10'000), large = memory.take(1'000'000);
  const void *ofSmall = small.data_ptr(), *ofLarge = large.data_ptr();
  small.reset();
  large.reset();
  at::Tensor again = memory.take(9'000);
  EXPECT_EQ(again.data_ptr(), ofSmall);
  at::Tensor beside = memory.take(9'000);
  EXPECT_EQ(beside.data_ptr(), ofLarge);
}

TEST(StagingMemory, ABufferThatIsTooSmallGoes) {
  StagingMemory memory;
  at::Tensor first = memory.take(1'000);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(first.storage().unsafeGetStorageImpl()));
  first.reset();
  EXPECT_FALSE(storage.expired());
  const at::Tensor larger = memory.take(100'000);
  EXPECT_TRUE(storage.expired());
  EXPECT_EQ(memory.take(0).numel(), 0);
}

TEST(StagingMemory, ThreadsNeverShareABuffer) {
  StagingMemory memory;
  std::atomic<int> mixed = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(thread);
      for (int i = 0; i < 2'000; ++i) {
        at::Tensor bytes = memory.take(1 + static_cast<int64_t>(random() % 20'000));
        bytes.fill_(thread);
        if (!bytes.eq(thread).all().item<bool>()) ++mixed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mixed, 0);
}

}  // namespace
}  // namespace farandole::ddp
