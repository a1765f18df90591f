#include "pipeline/runtime/step_agreement.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/pipeline/runtime/thread_backend.h"

namespace farandole::pipeline {
namespace {

// Runs `body(agreement, rank)` on each rank, a thread.
template <typename Body>
void onRanks(int size, Body body) {
  auto world = std::make_shared<ThreadWorld>(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      StepAgreement agreement(c10::make_intrusive<ThreadBackend>(world, rank), size);
      body(agreement, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(StepAgreement, OneVoteAgainstBindsAll) {
  for (int odd = -1; odd < 3; ++odd) {
    onRanks(3, [&](StepAgreement& agreement, int rank) {
      agreement.postVote({rank == odd, false, 42});
      StepAgreement::Outcome outcome = agreement.awaitVote();
      EXPECT_EQ(outcome.refused, odd >= 0);
      EXPECT_FALSE(outcome.relearn);
      EXPECT_TRUE(outcome.samePlan);
      agreement.postVote({false, rank == odd, rank == odd ? ~0ull : 42});
      outcome = agreement.awaitVote();
      EXPECT_EQ(outcome.relearn, odd >= 0);
      EXPECT_EQ(outcome.samePlan, odd < 0);
      EXPECT_EQ(agreement.anyFailed(rank == odd), odd >= 0);
    });
  }
}

TEST(StepAgreement, ReportsReachAllAndLongOnesAreCut) {
  onRanks(3, [](StepAgreement& agreement, int rank) {
    const std::string text(rank == 1 ? 100000 : 10, static_cast<char>('a' + rank));
    const std::vector<FailureReport> reports = agreement.exchangeReports({rank != 2, rank, text});
    ASSERT_EQ(reports.size(), 3u);
    EXPECT_EQ(reports[0].text, "aaaaaaaaaa");
    EXPECT_GT(reports[1].text.size(), 4000u);
    EXPECT_FALSE(reports[2].failed);
  });
}

TEST(StepAgreement, FailuresAreToldInTheOrderInWhichTheyHappened) {
  EXPECT_EQ(describeFailures({{true, 5, "late"}, {false, 1, "no failure"}, {true, 2, "early"}}),
            "early\n  after that: late");
}

}  // namespace
}  // namespace farandole::pipeline
