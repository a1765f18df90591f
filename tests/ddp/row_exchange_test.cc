#include "ddp/row_exchange.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <random>

#include "tests/ddp/thread_group.h"

namespace farandole::ddp {
namespace {

using Rows = std::vector<int64_t>;

// Another number for each sender, receiver, exchange and place.
int64_t numberOf(int from, int to, int exchange, int place) {
  return (int64_t{1} << 40) + ((from * 16 + to) * 64 + exchange) * 64 + place;
}

TEST(RowExchange, EachRankGetsTheRowsThatAreForIt) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  for (int size = 1; size <= 4; ++size) {
    std::mt19937 random(seed + size);
    std::vector<int> widths(8);
    for (int& width : widths) width = static_cast<int>(random() % 6);
    runThreads(size, [&](ThreadRank& self) {
      RowExchange exchange(self.group, at::kCPU);
      for (int i = 0; i < static_cast<int>(widths.size()); ++i) {
        Rows rows, expected;
        for (int rank = 0; rank < size; ++rank) {
          for (int place = 0; place < widths[i]; ++place) {
            rows.push_back(numberOf(self.rank, rank, i, place));
            expected.push_back(numberOf(rank, self.rank, i, place));
          }
        }
        exchange.start(rows);
        EXPECT_EQ(exchange.finish(), expected);
      }
    });
  }
}

TEST(RowExchange, SaysWhetherAllHaveCome) {
  std::promise<void> looked;
  runThreads(2, [&](ThreadRank& self) {
    RowExchange exchange(self.group, at::kCPU);
    EXPECT_TRUE(exchange.hasCome());
    if (self.rank == 0) {
      exchange.start({1, 2});
      EXPECT_FALSE(exchange.hasCome());
      looked.set_value();
      EXPECT_EQ(exchange.finish(), Rows({1, 3}));
    } else {
      ASSERT_EQ(looked.get_future().wait_for(std::chrono::seconds(10)), std::future_status::ready);
      exchange.start({3, 4});
      EXPECT_TRUE(exchange.hasCome());
      EXPECT_EQ(exchange.finish(), Rows({2, 4}));
    }
  });
}

TEST(RowExchange, RefusesRowsThatAreNotForAllRanksAndCallsOutOfOrder) {
  runThreads(2, [](ThreadRank& self) {
    RowExchange exchange(self.group, at::kCPU);
    EXPECT_THROW(exchange.finish(), c10::Error);
    EXPECT_THROW(exchange.start({1, 2, 3}), c10::Error);
    exchange.start({1, 2});
    EXPECT_THROW(exchange.start({1, 2}), c10::Error);
    EXPECT_EQ(exchange.finish(), Rows(2, self.rank + 1));
  });
}

TEST(RowExchange, EndsWhenTheGroupIsAbortedAndMayBeginAgain) {
  runThreads(2, [](ThreadRank& self) {
    RowExchange exchange(self.group, at::kCPU);
    if (self.rank == 1) return self.backend->abort();
    for (int i = 0; i < 2; ++i) {
      EXPECT_THROW(
          {
            exchange.start({1, 2});
            exchange.finish();
          },
          c10::Error);
    }
    EXPECT_TRUE(exchange.hasCome());
  });
}

}  // namespace
}  // namespace farandole::ddp
