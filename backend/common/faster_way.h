#pragma once

#include <array>
#include <cstdint>

namespace farandole {

// Which of two ways to move data is the faster one at present: false or true. Most go the way that has been; now and
// then a few in a row go the other one. For sizes that are about the same.
class FasterWay {
 public:
  FasterWay();

  // That of the next one.
  bool next();
  // What one of so many bytes has cost. The last that next() told may still be under way when it is called again.
  void note(bool way, std::uint64_t cost, std::uint64_t bytes);

  // How many go one way before others are tried: the more, the longer that has been the faster one, and by how much.
  static constexpr unsigned kFirstPause = 4;
  static constexpr unsigned kLongestPause = 1024;
  static constexpr unsigned kTried = 4;

 private:
  // The first that is tried finds its memory out of the caches, and does not count. Of the others the least does, which
  // no other program has changed.
  static constexpr std::size_t kKept = kTried - 1;

  static constexpr std::uint64_t kUnit = 64 << 10;

  std::uint64_t least(bool way) const;

  std::array<std::array<std::uint64_t, kKept>, 2> costs_;  // by way: of the last ones, for kUnit
  std::array<std::size_t, 2> noted_ = {};
  bool way_ = false;
  unsigned pause_ = kFirstPause;
  unsigned place_ = 0;  // of the next one, since the pause began
};

}  // namespace farandole
