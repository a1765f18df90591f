#include "backend/transport/shm/streaming_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace farandole::transport {
namespace {

TEST(StreamingCopy, CopiesAnySizeFromAnywhereToAnywhereAndNothingElse) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto upTo = [&](std::size_t last) { return std::uniform_int_distribution<std::size_t>(0, last)(random); };
  constexpr std::size_t kMargin = 200;
  for (int i = 0; i < 2000; ++i) {
    const std::size_t bytes = upTo(i % 2 == 0 ? 300 : 20'000);
    std::vector<unsigned char> from(bytes + kMargin);
    std::ranges::generate(from, [&] { return static_cast<unsigned char>(upTo(255)); });
    std::vector<unsigned char> to(bytes + kMargin, 7);
    const std::size_t source = upTo(kMargin);
    const std::size_t target = upTo(kMargin);
    std::vector<unsigned char> expected = to;
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(source), bytes,
                expected.begin() + static_cast<std::ptrdiff_t>(target));
    streamingCopy(to.data() + target, from.data() + source, bytes);
    ASSERT_EQ(to, expected) << bytes << " bytes from " << source << " to " << target;
  }
}

}  // namespace
}  // namespace farandole::transport
