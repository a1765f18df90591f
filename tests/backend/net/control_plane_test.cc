// The logic of the control plane, with the planes of all ranks in one process.
#include "backend/net/control_plane.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "tests/backend/net/control_cluster.h"
#include "tests/random_seed.h"

namespace farandole::net {
namespace {

std::string listed(ControlCluster& cluster, int rank) {
  std::string text;
  for (const auto& [failed, statuses] : cluster.listener(rank).failed()) text += "\n  " + statuses.front().toString();
  return text;
}

TEST(ControlPlane, TellsEveryOtherRankOnceWhoDied) {
  const std::uint64_t first = testing::someSeed();
  for (std::uint64_t round = 0; round < 12; ++round) {
    SCOPED_TRACE("seed " + std::to_string(first + round));
    std::mt19937_64 random(first + round);
    ControlCluster cluster(2 + static_cast<int>(random() % 39));
    const int victim = static_cast<int>(random() % cluster.size());
    cluster.joinAll();
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 80));  // also while they connect
    cluster.destroy(victim);
    for (int rank = 0; rank < cluster.size(); ++rank) {
      if (rank == victim) continue;
      ASSERT_TRUE(cluster.listener(rank).waitForFailureOf(victim)) << "rank " << rank << " of " << cluster.size();
    }
    std::this_thread::sleep_for(20ms);
    for (int rank = 0; rank < cluster.size(); ++rank) {
      if (rank == victim) continue;
      const auto failed = cluster.listener(rank).failed();
      ASSERT_EQ(failed.size(), 1U) << "rank " << rank;
      ASSERT_EQ(failed.at(victim).size(), 1U);
      const Status& status = failed.at(victim).front();
      EXPECT_EQ(status.code(), StatusCode::kPeerFailed);
      const std::string named = "rank " + std::to_string(victim) + " (host host" + std::to_string(victim) + ", pid " +
                                std::to_string(1000 + victim) + ")";
      EXPECT_NE(status.message().find(named), std::string_view::npos) << status.message();
    }
  }
}

TEST(ControlPlane, MissesARankThatDiesBeforeItJoins) {
  for (const int victim : {0, 2, 17}) {
    ControlCluster cluster(20);
    for (int rank = 0; rank < cluster.size(); ++rank) {
      if (rank != victim) cluster.join(rank);
    }
    cluster.destroy(victim);
    for (int rank = 0; rank < cluster.size(); ++rank) {
      if (rank != victim) {
        EXPECT_TRUE(cluster.listener(rank).waitForFailureOf(victim, 3s)) << rank;
      }
    }
  }
}

TEST(ControlPlane, NamesNobodyTwiceAndNoLivingRankWhenSeveralDie) {
  const std::uint64_t first = testing::someSeed();
  for (std::uint64_t round = 0; round < 8; ++round) {
    SCOPED_TRACE("seed " + std::to_string(first + round));
    std::mt19937_64 random(first + round);
    ControlCluster cluster(4 + static_cast<int>(random() % 37));
    cluster.joinAll();
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 80));
    std::vector<int> ranks(cluster.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    std::shuffle(ranks.begin(), ranks.end(), random);
    const std::vector<int> victims(ranks.begin(), ranks.begin() + 2 + static_cast<int>(random() % 2));
    for (const int victim : victims) cluster.destroy(victim);
    for (int rank = 0; rank < cluster.size(); ++rank) {
      if (!cluster.isAlive(rank)) continue;
      EXPECT_TRUE(cluster.listener(rank).waitFor([](const auto& l) { return !l.failed().empty(); })) << "rank " << rank;
    }
    std::this_thread::sleep_for(50ms);
    for (int rank = 0; rank < cluster.size(); ++rank) {
      if (!cluster.isAlive(rank)) continue;
      for (const auto& [failed, statuses] : cluster.listener(rank).failed()) {
        EXPECT_FALSE(cluster.isAlive(failed)) << "rank " << rank << " was told of " << failed;
        EXPECT_EQ(statuses.size(), 1U);
      }
    }
  }
}

TEST(ControlPlane, TellsEveryOtherRankWhoAborted) {
  ControlCluster cluster(23);
  cluster.joinAll();
  ASSERT_TRUE(cluster.plane(19).abort("g", "the loss is not a number").isOk());
  ASSERT_TRUE(cluster.plane(19).abort("g", "once more").isOk());
  for (int rank = 0; rank < cluster.size(); ++rank) {
    if (rank != 19) {
      ASSERT_TRUE(cluster.listener(rank).waitForAbortBy(19)) << "rank " << rank;
    }
  }
  std::this_thread::sleep_for(50ms);
  EXPECT_TRUE(cluster.listener(19).aborted().empty());
  for (int rank = 0; rank < cluster.size(); ++rank) {
    if (rank == 19) continue;
    const auto aborted = cluster.listener(rank).aborted();
    ASSERT_EQ(aborted.size(), 1U);
    ASSERT_EQ(aborted.at(19).size(), 1U);
    EXPECT_EQ(aborted.at(19).front().code(), StatusCode::kAborted);
    EXPECT_NE(aborted.at(19).front().message().find("the loss is not a number"), std::string_view::npos);
    EXPECT_TRUE(cluster.listener(rank).failed().empty()) << "rank " << rank << " was told:" << listed(cluster, rank);
  }
}

// By a rank that leaves for it: whoever hears of that has heard of the death, of which the plane itself knows nothing.
TEST(ControlPlane, TellsEveryOtherRankOfADeathThatOneHasSeen) {
  ControlCluster cluster(23);
  cluster.joinAll();
  for (const int reporter : {7, 0}) {  // each ends with this
    ASSERT_TRUE(cluster.plane(reporter).reportDeath("g", 19, "its process died").isOk());
    cluster.leave(reporter);
    cluster.destroy(reporter);
  }
  for (int rank = 0; rank < cluster.size(); ++rank) {
    if (rank == 0 || rank == 7) continue;
    ASSERT_TRUE(cluster.listener(rank).waitForFailureOf(19)) << "rank " << rank;
    const auto failed = cluster.listener(rank).failed();
    ASSERT_EQ(failed.size(), 1U) << "rank " << rank << " was told:" << listed(cluster, rank);
    ASSERT_EQ(failed.at(19).size(), 1U);
    const std::string text = failed.at(19).front().toString();
    EXPECT_NE(text.find("rank 19 (host host19, pid 1019) failed: its process died; noticed by rank "),
              std::string::npos)
        << text;
  }
}

TEST(ControlPlane, TakesRanksThatLeaveInAnyOrderForNoFailureAndStillCarriesNotices) {
  const std::uint64_t first = testing::someSeed();
  for (std::uint64_t round = 0; round < 12; ++round) {
    SCOPED_TRACE("seed " + std::to_string(first + round));
    std::mt19937_64 random(first + round);
    ControlCluster cluster(3 + static_cast<int>(random() % 38));
    cluster.joinAll();
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 60));
    std::vector<int> leavers(cluster.size());
    std::iota(leavers.begin(), leavers.end(), 0);
    std::shuffle(leavers.begin(), leavers.end(), random);
    const std::size_t staying = 2 + random() % (leavers.size() - 2);
    leavers.resize(leavers.size() - staying);
    for (const int rank : leavers) {
      cluster.leave(rank);
      if (random() % 2 == 0) cluster.destroy(rank);  // at once, or never
      if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 10));
    }
    std::vector<int> stayers;
    for (int rank = 0; rank < cluster.size(); ++rank) {
      if (std::find(leavers.begin(), leavers.end(), rank) == leavers.end()) stayers.push_back(rank);
    }
    const int aborter = stayers[random() % stayers.size()];
    ASSERT_TRUE(cluster.plane(aborter).abort("g", "test").isOk());
    for (const int rank : stayers) {
      if (rank != aborter) {
        EXPECT_TRUE(cluster.listener(rank).waitForAbortBy(aborter)) << "rank " << rank;
      }
    }
    const int victim = stayers[random() % stayers.size()];
    cluster.destroy(victim);
    for (const int rank : stayers) {
      if (rank != victim) {
        EXPECT_TRUE(cluster.listener(rank).waitForFailureOf(victim)) << "rank " << rank;
      }
    }
    for (const int rank : stayers) {
      if (rank != victim) {
        EXPECT_EQ(cluster.listener(rank).failed().size(), 1U)
            << "rank " << rank << " was told:" << listed(cluster, rank);
      }
    }
    for (const int rank : leavers) {
      EXPECT_TRUE(cluster.listener(rank).aborted().empty());
    }
  }
}

TEST(ControlPlane, TellsWhoHasLeftItsLastGroupAndNotWhoIsInAnotherOne) {
  ControlCluster cluster(6);
  cluster.joinAll("a");
  cluster.joinAll("b");
  std::this_thread::sleep_for(100ms);
  cluster.leave(1, "b");
  cluster.leave(2, "b");
  cluster.leave(2, "a");
  cluster.plane(3).leaveAllGroups();
  for (const int rank : {0, 1, 4, 5}) {
    const RecordingListener& listener = cluster.listener(rank);
    const int groups = rank == 1 ? 1 : 2;  // that it is in with rank 3
    const std::map<int, int> expected = {{2, 1}, {3, groups}};
    EXPECT_TRUE(listener.waitFor([&](const auto& l) { return l.gone() == expected; })) << "rank " << rank;
    // Rank 1 is in "a" as well.
    EXPECT_TRUE(listener.waitFor([&](const auto& l) { return rank == 1 || l.left() == std::set{1, 2, 3}; }));
    EXPECT_TRUE(listener.failed().empty());
  }
  std::this_thread::sleep_for(50ms);
  for (const int rank : {0, 4, 5}) EXPECT_EQ(cluster.listener(rank).gone().size(), 2u) << "rank " << rank;
  for (const int rank : {2, 3}) EXPECT_EQ(cluster.listener(rank).gone().count(rank), 0u) << "rank " << rank;
}

TEST(ControlPlane, IsTornDownByAllRanksAtOnceWithoutOneReport) {
  const std::uint64_t first = testing::someSeed();
  for (std::uint64_t round = 0; round < 15; ++round) {
    SCOPED_TRACE("seed " + std::to_string(first + round));
    std::mt19937_64 random(first + round);
    ControlCluster cluster(2 + static_cast<int>(random() % 20));
    cluster.joinAll();
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 40));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < cluster.size(); ++rank) {
      const auto pause = std::chrono::milliseconds(random() % 30);
      threads.emplace_back([&cluster, rank, pause] {
        std::this_thread::sleep_for(pause);
        cluster.leave(rank);
        cluster.destroy(rank);
      });
    }
    for (auto& thread : threads) thread.join();
    for (int rank = 0; rank < cluster.size(); ++rank)
      EXPECT_TRUE(cluster.listener(rank).failed().empty()) << "rank " << rank << " was told:" << listed(cluster, rank);
  }
}

TEST(ControlPlane, IsDestroyedWithin200Milliseconds) {
  for (const bool leave : {false, true}) {
    std::vector<std::chrono::steady_clock::duration> took;
    ControlCluster cluster(20);
    cluster.joinAll();
    std::this_thread::sleep_for(50ms);
    for (int rank = 0; rank < cluster.size(); ++rank) {
      if (leave) cluster.leave(rank);
      const auto start = std::chrono::steady_clock::now();
      cluster.destroy(rank);
      took.push_back(std::chrono::steady_clock::now() - start);
    }
    std::ranges::nth_element(took, took.begin() + 10);
    EXPECT_LT(took[10], 200ms) << (leave ? "left" : "died");  // the median: a busy machine may hold up some
  }
}

long openDescriptors() {
  const std::filesystem::directory_iterator begin("/proc/self/fd");
  return std::distance(begin, std::filesystem::directory_iterator());
}

TEST(ControlPlane, LeavesNoDescriptorBehind) {
  {
    ControlCluster warmUp(2);
    warmUp.joinAll();
  }
  const long before = openDescriptors();
  for (int round = 0; round < 5; ++round) {
    ControlCluster cluster(20);
    cluster.joinAll();
    std::this_thread::sleep_for(std::chrono::milliseconds(15 * round));
    if (round % 2 == 0) cluster.leave(round);
    cluster.destroy(round);
  }
  EXPECT_EQ(openDescriptors(), before);
}

TEST(ControlPlane, IsDestroyedAfterItsLoopWasStopped) {
  EventLoop loop("test");
  auto plane = ControlPlane::listen(loop);
  ASSERT_TRUE(plane) << plane.status().toString();
  const std::vector<ControlMember> members = {{(*plane)->address(), "h", 1}, {(*plane)->address(), "h", 2}};
  const auto listener = std::make_shared<RecordingListener>();
  ASSERT_TRUE((*plane)->joinGroup("g", 0, members, kTestToken, listener).isOk());
  loop.stop();
  (*plane).reset();
}

TEST(ControlPlane, CarriesSeveralGroupsOverOneConnectionAndKeepsThemApart) {
  ControlCluster cluster(2);
  for (const char* group : {"a", "b", "c"}) cluster.joinAll(group);
  std::this_thread::sleep_for(100ms);
  cluster.leave(1, "a");
  ASSERT_TRUE(cluster.plane(0).abort("b", "only b").isOk());
  ASSERT_TRUE(cluster.listener(1).waitForAbortBy(0));
  EXPECT_TRUE(cluster.listener(0).failed().empty());
  cluster.destroy(1);
  ASSERT_TRUE(cluster.listener(0).waitForFailureOf(1));
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(cluster.listener(0).failed().at(1).size(), 2U);  // in b and in c
}

TEST(ControlPlane, UsesAGroupsNameAgainWithAnotherToken) {
  ControlCluster cluster(3);
  for (int i = 0; i < 30; ++i) {
    const std::string token = kTestToken + std::to_string(i);
    for (int rank = 0; rank < 3; ++rank) {
      const Status status =
          cluster.plane(rank).joinGroup("g", rank, cluster.members(), token, cluster.sharedListener(rank));
      ASSERT_TRUE(status.isOk()) << status.toString();
    }
    ASSERT_TRUE(cluster.plane(i % 3).abort("g", "round").isOk());
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == i % 3) continue;
      ASSERT_TRUE(cluster.listener(rank).waitFor([&](const auto& l) {
        const auto aborted = l.aborted();
        return aborted.count(i % 3) > 0 && aborted.at(i % 3).size() == static_cast<std::size_t>(i / 3 + 1);
      })) << "round "
          << i;
    }
    for (int rank = 0; rank < 3; ++rank) cluster.leave(rank);
  }
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_TRUE(cluster.listener(rank).failed().empty()) << "rank " << rank << " was told:" << listed(cluster, rank);
}

TEST(ControlPlane, TellsARankThatJoinsLateWhatHappenedBefore) {
  ControlCluster cluster(5);
  for (const int rank : {0, 1, 2, 3}) cluster.join(rank);
  ASSERT_TRUE(cluster.plane(3).abort("g", "early").isOk());
  std::this_thread::sleep_for(100ms);
  cluster.join(4);
  EXPECT_TRUE(cluster.listener(4).waitForAbortBy(3));
}

TEST(ControlPlane, DoesNotWaitForARankThatIsLateToJoin) {
  ControlCluster cluster(4);
  for (const int rank : {1, 2, 3}) cluster.join(rank);  // all children of 0, which is late
  ASSERT_TRUE(cluster.plane(3).abort("g", "early").isOk());
  EXPECT_TRUE(cluster.listener(1).waitForAbortBy(3));
  EXPECT_TRUE(cluster.listener(2).waitForAbortBy(3));
  cluster.join(0);
  EXPECT_TRUE(cluster.listener(0).waitForAbortBy(3));
  for (const int rank : {0, 1, 2, 3})
    EXPECT_TRUE(cluster.listener(rank).failed().empty()) << "rank " << rank << " was told:" << listed(cluster, rank);
}

TEST(ControlPlane, RefusesMisuseByName) {
  ControlCluster cluster(2);
  const auto listener = cluster.sharedListener(0);
  auto message = [&](int rank, const std::vector<ControlMember>& members, const std::string& token,
                     const std::string& group) {
    return cluster.plane(0).joinGroup(group, rank, members, token, listener).toString();
  };
  EXPECT_NE(message(2, cluster.members(), kTestToken, "g").find("rank is 2"), std::string::npos);
  EXPECT_NE(message(1, cluster.members(), kTestToken, "g").find("members[1].address"), std::string::npos);
  EXPECT_NE(message(0, cluster.members(), "short", "g").find("token has 5 bytes"), std::string::npos);
  auto broken = cluster.members();
  broken[1].address = "nonsense";
  EXPECT_NE(message(0, broken, kTestToken, "g").find("members[1].address"), std::string::npos);
  EXPECT_EQ(cluster.plane(0).abort("h", "x").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(cluster.plane(0).leaveGroup("h").code(), StatusCode::kInvalidArgument);
  cluster.join(0);
  EXPECT_NE(message(0, cluster.members(), kTestToken, "g").find("joined already"), std::string::npos);
}

}  // namespace
}  // namespace farandole::net
