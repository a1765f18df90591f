#pragma once

#include <array>
#include <cstdint>

namespace farandole {

// Which of two or three ways to move data is the fastest one at present, by their numbers from 0 on. Most go the way
// that has been; now and then a few in a row go each of the others. For sizes that are about the same.
class FastestWay {
 public:
  static constexpr unsigned kMostWays = 3;

  explicit FastestWay(unsigned ways = 2);

  // That of the next one.
  unsigned next();
  // Whether it matters what the one has cost that next() told last.
  bool isTrying() const { return place_ > pause_; }
  // What one of so many bytes has cost. The last that next() told may still be under way when it is called again.
  void note(unsigned way, std::uint64_t cost, std::uint64_t bytes);

  // How many go one way before others are tried: the more, the longer that has been the fastest one, and by how much.
  static constexpr unsigned kFirstPause = 4;
  static constexpr unsigned kLongestPause = 1024;
  static constexpr unsigned kTried = 5;

 private:
  // The first that are tried find their memory out of the caches, or as another way has left it, in each of the two
  // places that are used in turn, and do not count. Of the others the least does, which no other program has changed.
  static constexpr std::size_t kKept = kTried - 2;

  static constexpr std::uint64_t kUnit = 64 << 10;

  std::uint64_t least(unsigned way) const;

  std::array<std::array<std::uint64_t, kKept>, kMostWays> costs_;  // by way: of the last ones, for kUnit
  std::array<std::size_t, kMostWays> noted_ = {};
  unsigned numWays_;
  unsigned way_ = 0;
  unsigned pause_ = kFirstPause;
  unsigned place_ = 0;  // of the next one, since the pause began
};

}  // namespace farandole
