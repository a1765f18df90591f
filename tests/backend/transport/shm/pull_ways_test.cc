#include "backend/transport/shm/pull_ways.h"

#include <gtest/gtest.h>

#include <array>

namespace farandole::transport {
namespace {

// Two processes that receive from each other, and what a message costs: `alike` where both do the same, by whether they
// read; `apart` where they do not.
struct Two {
  std::array<std::uint64_t, 2> alike;
  std::uint64_t apart;
  PullWays::Told told{};
  std::array<PullWays, 2> sides{};
  std::array<bool, 2> last{};
  int differed = 0;

  bool receive(int side, std::size_t bytes) {
    const bool reads = sides[side].readsAtOnce(bytes, told, side == 0);
    last[side] = reads;
    sides[side].note(bytes, reads, last[1 - side] == reads ? alike[reads] : apart);
    return reads;
  }
  // How many of so many, of each side, were read.
  std::array<int, 2> exchange(int times, std::size_t bytes) {
    std::array<int, 2> read{};
    for (int i = 0; i < times; ++i) {
      for (int side = 0; side < 2; ++side) read[side] += receive(side, bytes) ? 1 : 0;
      differed += last[0] != last[1] ? 1 : 0;
    }
    return read;
  }
};

constexpr int kTimes = 20'000;
constexpr int kFew = kTimes / 50;

TEST(PullWays, BothFindTheFastestWayAndBackAgain) {
  Two two{.alike = {100, 150}, .apart = 160};
  auto read = two.exchange(kTimes, 1 << 20);
  EXPECT_LT(read[0], kFew);
  EXPECT_LT(read[1], kFew);
  EXPECT_EQ(two.differed, 0);
  two.alike = {150, 100};
  two.exchange(2 * FastestWay::kLongestPause, 1 << 20);
  read = two.exchange(kTimes, 1 << 20);
  EXPECT_GT(read[0], kTimes - kFew);
  EXPECT_GT(read[1], kTimes - kFew);
}

TEST(PullWays, TheOneThatIsToldNothingMeasuresForItself) {
  Two two{.alike = {100, 150}, .apart = 150};
  int read = 0;
  for (int i = 0; i < kTimes; ++i) {
    two.last[0] = two.last[1];  // the sender does what is wanted
    read += two.receive(1, 1 << 20) ? 1 : 0;
  }
  EXPECT_LT(read, kFew);
  two.sides[0] = {};
  two.alike = {150, 100};
  const auto both = two.exchange(kTimes, 1 << 20);  // and now it is told
  EXPECT_GT(both[1], kTimes - kFew);
}

TEST(PullWays, EachSizeHasItsOwn) {
  Two two{.alike = {100, 150}, .apart = 160};
  two.exchange(kTimes, 1 << 20);
  EXPECT_FALSE(two.receive(0, (2 << 20) - 1));
  for (const std::size_t bytes : {PullWays::kSmallest, std::size_t{256} << 10, std::size_t{16} << 20}) {
    EXPECT_TRUE(two.receive(0, bytes)) << bytes;
  }
}

}  // namespace
}  // namespace farandole::transport
