#include "backend/collective/reading_trial.h"

#include <gtest/gtest.h>

#include <array>
#include <future>

#include "tests/backend/collective/communicators.h"

namespace farandole::collective {
namespace {

using namespace std::chrono_literals;
using testing::Group;
using Agreed = std::array<Result<std::size_t>, 2>;

Agreed agree(Group& group, std::array<std::size_t, 2> known) {
  const auto one = [&](int rank) {
    return std::async(std::launch::async,
                      [&group, rank, known] { return agreeOnReading(group[rank], known[rank], 20s); });
  };
  auto first = one(0);
  auto second = one(1);
  return {first.get(), second.get()};
}

TEST(ReadingTrial, BothRanksComeToTheSameWhateverItIs) {
  Group group(2, Group::kSharedMemory);
  for (int i = 0; i < 20; ++i) {
    const Agreed agreed = agree(group, {kReadingUnknown, kReadingUnknown});
    ASSERT_TRUE(agreed[0]) << agreed[0].status().toString();
    ASSERT_TRUE(agreed[1]) << agreed[1].status().toString();
    EXPECT_EQ(*agreed[0], *agreed[1]);
    EXPECT_NE(*agreed[0], kReadingUnknown);
  }
}

TEST(ReadingTrial, WhatOneOfThemKnowsIsNotMeasuredAgain) {
  Group group(2, Group::kSharedMemory);
  constexpr std::size_t kOne = 12'345;  // which nothing measures
  for (const auto& known : {std::array{kOne, kReadingUnknown}, std::array{kReadingUnknown, kOne},
                            std::array{kOne, kOne + 1}, std::array{kOne, Topology::kNeverReads}}) {
    const Agreed agreed = agree(group, known);
    for (const auto& one : agreed) EXPECT_EQ(one.value(), kOne);
  }
}

TEST(ReadingTrial, MemoryThatCannotBeReadIsNotFaster) {
  Group group(2, Group::kUnreadable);
  for (const std::size_t known : {kReadingUnknown, std::size_t{12'345}}) {
    const Agreed agreed = agree(group, {known, kReadingUnknown});
    for (const auto& one : agreed) EXPECT_EQ(one.value(), Topology::kNeverReads);
  }
}

TEST(ReadingTrial, ARankThatDoesNotComeIsNamedAfterTheTimeout) {
  Group group(2, Group::kSharedMemory);
  const Result<std::size_t> alone = agreeOnReading(group[0], kReadingUnknown, 50ms);
  ASSERT_FALSE(alone);
  EXPECT_EQ(alone.status().code(), StatusCode::kTimeout) << alone.status().toString();
  EXPECT_NE(alone.status().toString().find("rank 1"), std::string::npos) << alone.status().toString();
}

TEST(ReadingTrial, ARankThatGivesUpEndsTheTrial) {
  Group group(2, Group::kSharedMemory);
  auto waiting = std::async(std::launch::async, [&] { return agreeOnReading(group[0], kReadingUnknown, 20s); });
  group[1]->abortAll(Status::aborted("enough"));
  const Result<std::size_t> alone = waiting.get();
  ASSERT_FALSE(alone);
  EXPECT_NE(alone.status().toString().find("enough"), std::string::npos) << alone.status().toString();
}

}  // namespace
}  // namespace farandole::collective
