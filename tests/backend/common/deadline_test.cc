#include "backend/common/deadline.h"

#include <gtest/gtest.h>

namespace farandole {
namespace {

using namespace std::chrono_literals;
using Time = std::chrono::steady_clock::time_point;
using std::chrono::milliseconds;

TEST(DeadlineTest, IsSoMuchLater) {
  const Time now = Time() + 1234567ns;
  for (const milliseconds timeout : {0ms, 1ms, 86'400'000ms}) EXPECT_EQ(deadlineAfter(now, timeout) - now, timeout);
  EXPECT_GE(deadlineIn(1ms), std::chrono::steady_clock::now());
}

// A clock of nanoseconds ends after 292 years.
TEST(DeadlineTest, ComesNeverWhereTheClockEndsBefore) {
  const Time now = Time() + 1234567ns;
  for (const auto timeout :
       {milliseconds::max(), milliseconds(86'399'999'999'999'999), milliseconds(300 * 365 * 24h)}) {
    EXPECT_EQ(deadlineAfter(now, timeout), Time::max());
    EXPECT_EQ(deadlineIn(timeout), Time::max());
  }
}

}  // namespace
}  // namespace farandole
