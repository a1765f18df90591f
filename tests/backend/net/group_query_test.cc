#include "backend/net/group_query.h"

#include <gtest/gtest.h>

#include <future>
#include <random>
#include <thread>

#include "tests/backend/net/control_cluster.h"

namespace farandole::net {
namespace {

std::future<GroupAnswers> ask(ControlCluster& cluster, int rank, std::chrono::milliseconds limit) {
  auto promise = std::make_shared<std::promise<GroupAnswers>>();  // throws if it is set twice
  auto answers = promise->get_future();
  const Status status = cluster.plane(rank).askAllRanks(
      "g", limit, [promise](GroupAnswers given) { promise->set_value(std::move(given)); });
  EXPECT_TRUE(status.isOk()) << status.toString();
  return answers;
}

TEST(GroupQuery, GathersTheReportOfEveryRankForEveryAsker) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (const int size : {1, 2, 40}) {
    ControlCluster cluster(size);
    cluster.joinAll();
    std::this_thread::sleep_for(200ms);
    std::vector<std::future<GroupAnswers>> all(5);
    for (auto& future : all) future = ask(cluster, static_cast<int>(random() % size), 5s);
    for (auto& future : all) {
      ASSERT_EQ(future.wait_for(4s), std::future_status::ready);
      const GroupAnswers answers = future.get();
      ASSERT_EQ(answers.size(), static_cast<std::size_t>(size));
      for (int rank = 0; rank < size; ++rank) {
        EXPECT_EQ(answers[static_cast<std::size_t>(rank)], "report of " + std::to_string(rank));
      }
    }
  }
}

// As when all ranks of a group find at once that something takes too long.
TEST(GroupQuery, AnswersEverybodyWhereAllAskAtOnce) {
  constexpr int kSize = 40;
  ControlCluster cluster(kSize);
  cluster.joinAll();
  std::this_thread::sleep_for(200ms);
  std::vector<std::future<GroupAnswers>> all;
  for (int i = 0; i < 5 * kSize; ++i) all.push_back(ask(cluster, i % kSize, 20s));
  for (auto& future : all) {
    ASSERT_EQ(future.wait_for(15s), std::future_status::ready);
    for (const auto& answer : future.get()) EXPECT_TRUE(answer.has_value());
  }
}

TEST(GroupQuery, EndsAtItsLimitAndNamesWhoDidNotAnswer) {
  ControlCluster cluster(6);
  for (const int rank : {0, 1, 2, 4, 5}) cluster.join(rank);  // 3 is there, and silent
  std::this_thread::sleep_for(100ms);
  const auto start = std::chrono::steady_clock::now();
  const GroupAnswers answers = ask(cluster, 4, 300ms).get();
  EXPECT_GE(std::chrono::steady_clock::now() - start, 300ms);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 1s);
  for (int rank = 0; rank < 6; ++rank) EXPECT_EQ(answers[static_cast<std::size_t>(rank)].has_value(), rank != 3);
}

TEST(GroupQuery, DoesNotWaitForRanksThatAreGone) {
  ControlCluster cluster(5);
  cluster.joinAll();
  std::this_thread::sleep_for(200ms);
  cluster.leave(0);
  cluster.destroy(3);
  ASSERT_TRUE(cluster.listener(4).waitForFailureOf(3));
  std::this_thread::sleep_for(200ms);
  auto future = ask(cluster, 4, 20s);
  ASSERT_EQ(future.wait_for(5s), std::future_status::ready);
  const GroupAnswers answers = future.get();
  for (int rank = 0; rank < 5; ++rank) {
    EXPECT_EQ(answers[static_cast<std::size_t>(rank)].has_value(), rank != 0 && rank != 3) << rank;
  }
}

TEST(GroupQuery, EndsWithWhatCameWhenTheAskerLeaves) {
  ControlCluster cluster(3);
  for (const int rank : {0, 2}) cluster.join(rank);
  std::this_thread::sleep_for(100ms);
  auto future = ask(cluster, 2, 20s);
  std::this_thread::sleep_for(50ms);
  cluster.leave(2);
  ASSERT_EQ(future.wait_for(5s), std::future_status::ready);
  const GroupAnswers answers = future.get();
  EXPECT_TRUE(answers[0].has_value());
  EXPECT_FALSE(answers[1].has_value());
}

}  // namespace
}  // namespace farandole::net
