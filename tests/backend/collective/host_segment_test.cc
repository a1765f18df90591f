#include "backend/collective/host_segment.h"

#include <gtest/gtest.h>

#include <map>
#include <utility>
#include <vector>

namespace farandole::collective {
namespace {

HostSegment segmentOf(int size) {
  return HostSegment(HostSegment::create(size, HostSegment::kSmallestWindow).value(), 0, size);
}

struct Bytes {
  const std::byte* begin;
  std::size_t size;
  bool overlaps(const Bytes& other) const { return begin < other.begin + other.size && other.begin < begin + size; }
};

TEST(HostSegment, OfTwoRanksEachWritesTheSlotThatItReadLastOfThoseOfItsTurn) {
  const HostSegment host = segmentOf(2);
  for (std::uint64_t number = 0; number < 9; ++number) {
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(host.slot(rank, {0, number + 2}), host.slot(1 - rank, {0, number}));
      EXPECT_NE(host.slot(rank, {0, number + 1}), host.slot(rank, {0, number}));
      EXPECT_NE(host.slot(rank, {0, number + 1}), host.slot(1 - rank, {0, number}));
    }
  }
}

TEST(HostSegment, OfMoreRanksEachHasSlotsOfItsOwn) {
  const HostSegment host = segmentOf(3);
  for (std::uint64_t number = 0; number < 9; ++number) {
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(host.slot(rank, {0, number + 2}), host.slot(rank, {0, number}));
  }
}

TEST(HostSegment, WhereARankPassesSomethingItHasTakenWhatWasPassedThereLast) {
  for (int size = 2; size < 6; ++size) {
    const HostSegment host = segmentOf(size);
    const std::size_t share = host.windowBytes() / size;
    std::map<const std::byte*, std::pair<int, int>> last;  // by place: from, to
    for (std::uint64_t piece = 0; piece < 5 * HostSegment::kWindows; ++piece) {
      std::vector<Bytes> all;  // of this piece and those that may not have been taken
      for (std::uint64_t i = piece; i < piece + HostSegment::kWindows; ++i) {
        for (int from = 0; from < size; ++from) {
          for (int to = 0; to < size; ++to) {
            if (to != from) all.push_back({host.passed(from, to, i, share), share});
          }
        }
      }
      for (std::size_t i = 0; i < all.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) ASSERT_FALSE(all[i].overlaps(all[j])) << size << " ranks, piece " << piece;
      }
      for (int from = 0; from < size; ++from) {
        for (int to = 0; to < size; ++to) {
          if (to == from) continue;
          const auto [place, isNew] = last.try_emplace(host.passed(from, to, piece, share), from, to);
          if (!isNew) {
            ASSERT_EQ(place->second, std::pair(to, from));
          }
          place->second = {from, to};
        }
      }
    }
    EXPECT_EQ(last.size(), HostSegment::kWindows * size * (size - 1));
  }
}

TEST(HostSegment, LongWindowsChangeHandsToo) {
  const HostSegment host = segmentOf(2);
  const std::size_t bytes = host.longWindowBytes();
  for (std::uint64_t piece = 0; piece < 9; ++piece) {
    for (int rank = 0; rank < 2; ++rank) {
      const Bytes own{host.longPassed(rank, piece), bytes};
      EXPECT_FALSE(own.overlaps({host.longPassed(1 - rank, piece), bytes}));
      EXPECT_FALSE(own.overlaps({host.longPassed(rank, piece + 1), bytes}));
      EXPECT_FALSE(own.overlaps({host.longPassed(1 - rank, piece + 1), bytes}));
      EXPECT_EQ(own.begin, host.longPassed(1 - rank, piece + HostSegment::kLongWindows));
    }
  }
}

}  // namespace
}  // namespace farandole::collective
