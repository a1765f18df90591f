#include "pipeline/sparse/thread_choice.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace farandole::pipeline::sparse {
namespace {

// A step whose stages wait so long, and in which everything else takes a second.
StepTimes stepOf(const ThreadChoice& choice, double load, double dist, double handOver = 0.0) {
  StepTimes times;
  times.loadBlocked = choice.loadOnThread() ? 0 : load;
  times.distBlocked = choice.distOnThread() ? 0 : dist;
  const double beside = std::max({1.0, choice.loadOnThread() ? load : 0.0, choice.distOnThread() ? dist : 0.0});
  times.step = beside + times.loadBlocked + times.distBlocked;
  if (choice.loadOnThread() || choice.distOnThread()) times.step += handOver;
  return times;
}

void run(ThreadChoice& choice, std::size_t steps, double load, double dist, double handOver = 0.0) {
  for (std::size_t step = 0; step < steps; ++step) choice.stepTook(stepOf(choice, load, dist, handOver));
}

constexpr std::size_t kWay = ThreadChoice::kWarmUp + ThreadChoice::kWindow;
constexpr std::size_t kTrial = 2 * kWay * ThreadChoice::kRounds;
constexpr auto kMeasured = ThreadUse::kAsMeasured;

TEST(ThreadChoice, StaysInlineWhereStagesCompute) {
  ThreadChoice choice(kMeasured, kMeasured);
  for (std::size_t step = 0; step < 10 * kTrial; ++step) {
    run(choice, 1, 0.01, 0.04);
    EXPECT_FALSE(choice.loadOnThread());
    EXPECT_FALSE(choice.distOnThread());
  }
}

TEST(ThreadChoice, PutsAStageThatWaitsOnAThread) {
  ThreadChoice choice(kMeasured, kMeasured);
  for (std::size_t round = 0; round < ThreadChoice::kRounds; ++round) {
    EXPECT_FALSE(choice.loadOnThread());
    run(choice, kWay, 0.8, 0.01);
    EXPECT_TRUE(choice.loadOnThread());
    EXPECT_FALSE(choice.distOnThread());
    run(choice, kWay, 0.8, 0.01);
  }
  EXPECT_TRUE(choice.loadOnThread());
  run(choice, ThreadChoice::kPeriod / 2, 0.8, 0.01);
  EXPECT_TRUE(choice.loadOnThread());
}

TEST(ThreadChoice, TimesStagesWhileItComparesAndAgainAfterAPeriod) {
  ThreadChoice choice(kMeasured, kMeasured);
  for (std::size_t step = 0; step < kTrial; ++step) {  // inline, and with threads
    EXPECT_TRUE(choice.isTiming());
    run(choice, 1, 0.8, 0.0);
  }
  for (std::size_t step = 0; step < ThreadChoice::kPeriod; ++step) {
    EXPECT_FALSE(choice.isTiming());
    run(choice, 1, 0.8, 0.0);
  }
  EXPECT_TRUE(choice.isTiming());
  EXPECT_FALSE(ThreadChoice(ThreadUse::kAlways, ThreadUse::kNever).isTiming());
}

TEST(ThreadChoice, TakesAThreadBackThatMadeStepsNoShorter) {
  ThreadChoice choice(kMeasured, kMeasured);
  run(choice, kWay, 0.3, 0.3, 0.7);
  EXPECT_TRUE(choice.loadOnThread());
  EXPECT_TRUE(choice.distOnThread());
  run(choice, kWay, 0.3, 0.3, 0.7);
  EXPECT_FALSE(choice.loadOnThread());
  EXPECT_FALSE(choice.distOnThread());
}

TEST(ThreadChoice, TakesNoThreadThatMadeStepsShorterOnce) {
  for (std::size_t lucky = 1; lucky < ThreadChoice::kRounds; ++lucky) {
    ThreadChoice choice(kMeasured, kMeasured);
    run(choice, lucky * 2 * kWay, 0.3, 0.3);
    EXPECT_TRUE(choice.isTiming());
    run(choice, 2 * kWay, 0.3, 0.3, 0.7);
    EXPECT_FALSE(choice.isTiming());
    EXPECT_FALSE(choice.loadOnThread());
    EXPECT_FALSE(choice.distOnThread());
  }
}

TEST(ThreadChoice, TakesHardlyAThreadWhereStepsDifferByChanceAlone) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::normal_distribution<double> step(1.0, 0.1);
  std::size_t taken = 0;
  constexpr std::size_t kChoices = 1000;
  for (std::size_t i = 0; i < kChoices; ++i) {
    ThreadChoice choice(kMeasured, kMeasured);
    while (choice.isTiming()) choice.stepTook({step(random), 0.0, 0.2});
    taken += choice.distOnThread() ? 1 : 0;
  }
  EXPECT_LT(taken, kChoices / 10);
}

TEST(ThreadChoice, LooksAgainAfterAPeriodAndLessOftenWhereNothingChanged) {
  ThreadChoice choice(kMeasured, ThreadUse::kNever);
  run(choice, kWay, 0.0, 0.0);
  run(choice, ThreadChoice::kPeriod * 2, 0.9, 0.0);  // its stages wait now
  run(choice, kTrial, 0.9, 0.0);
  EXPECT_TRUE(choice.loadOnThread());
  std::size_t inlineSteps = 0;
  constexpr std::size_t kSteps = 40 * ThreadChoice::kPeriod;
  for (std::size_t step = 0; step < kSteps; ++step) {
    inlineSteps += choice.loadOnThread() ? 0 : 1;
    run(choice, 1, 0.9, 0.0);
  }
  EXPECT_GT(inlineSteps, 0);
  EXPECT_LT(inlineSteps, kSteps / 300);
  EXPECT_FALSE(choice.distOnThread());
}

TEST(ThreadChoice, ObeysWhoHasDecided) {
  ThreadChoice choice(ThreadUse::kAlways, ThreadUse::kNever);
  run(choice, 3 * ThreadChoice::kPeriod, 0.0, 5.0);
  EXPECT_TRUE(choice.loadOnThread());
  EXPECT_FALSE(choice.distOnThread());
}

}  // namespace
}  // namespace farandole::pipeline::sparse
