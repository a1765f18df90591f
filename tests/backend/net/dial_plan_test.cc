#include "backend/net/dial_plan.h"

#include <gtest/gtest.h>

#include <set>

namespace farandole::net {
namespace {

using namespace std::chrono_literals;

const DialPlan::Time kStart{};

TEST(DialPlan, BelievesARefusalByAllAddressesSoon) {
  DialPlan plan({"a", "b"}, 5s, 30s, kStart);
  std::multiset<std::string> tried;
  auto now = kStart;
  while (true) {
    const auto next = plan.next(now);
    if (const auto* status = std::get_if<Status>(&next)) {
      EXPECT_EQ(status->code(), StatusCode::kPeerFailed);
      break;
    }
    now += std::get<DialPlan::Attempt>(next).pause;
    tried.insert(std::get<DialPlan::Attempt>(next).host);
    plan.failed(DialPlan::Outcome::kRefused, "refused");
  }
  EXPECT_EQ(tried, (std::multiset<std::string>{"a", "a", "a", "b", "b", "b"}));
  EXPECT_LT(now - kStart, 200ms);
}

// One address refuses (another host's container bridge, say), one is silent.
DialPlan::Time giveUpTime(bool somebodyConnects) {
  DialPlan plan({"refusing", "silent"}, 5s, 30s, kStart);
  auto now = kStart;
  while (true) {
    const auto next = plan.next(now);
    if (const auto* status = std::get_if<Status>(&next)) {
      EXPECT_EQ(status->code(), StatusCode::kTimeout);
      return now;
    }
    const auto& attempt = std::get<DialPlan::Attempt>(next);
    now += attempt.pause;
    if (attempt.host == "refusing") {
      plan.failed(DialPlan::Outcome::kRefused, "refused");
    } else {
      if (somebodyConnects) plan.connected();
      now += attempt.limit;
      plan.failed(DialPlan::Outcome::kSilent, "no answer");
    }
  }
}

TEST(DialPlan, GivesASilentHostSecondsAndAStoppedProcessLonger) {
  EXPECT_GE(giveUpTime(false), kStart + 5s);
  EXPECT_LE(giveUpTime(false), kStart + 11s);
  EXPECT_GE(giveUpTime(true), kStart + 30s);
  EXPECT_LE(giveUpTime(true), kStart + 36s);
}

TEST(DialPlan, RefusesToDialNobody) {
  const auto next = DialPlan({}, 5s, 30s, kStart).next(kStart);
  ASSERT_TRUE(std::holds_alternative<Status>(next));
  EXPECT_EQ(std::get<Status>(next).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace farandole::net
