// Groups whose ranks are on several hosts, with every algorithm that there is, one after the other.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "backend/collective/algorithms.h"
#include "backend/collective/host_layout.h"
#include "tests/backend/collective/communicators.h"
#include "tests/backend/collective/slices.h"
#include "tests/backend/collective/sums.h"

namespace farandole::collective {
namespace {

using testing::Group;
using testing::sliceOf;
using testing::slicesOf;
using testing::TestOperation;
using Data = std::vector<std::int64_t>;

template <typename T>
void average(void* dst, const void* const* sources, int numSources, std::size_t count) {
  testing::addUp<T>(dst, sources, numSources, count);
  for (std::size_t i = 0; i < count; ++i) static_cast<T*>(dst)[i] /= static_cast<T>(numSources);
}

template <typename T>
void divide(void* dst, const void* const* sources, int numParts, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    static_cast<T*>(dst)[i] = static_cast<const T*>(sources[0])[i] / static_cast<T>(numParts);
  }
}

constexpr Reduction kSum = testing::kSumOf<std::int64_t>;
constexpr Reduction kAverage{&average<std::int64_t>, sizeof(std::int64_t), 0, &testing::addUp<std::int64_t>,
                             &divide<std::int64_t>};
constexpr Reduction kFloatSum = testing::kSumOf<float>;

Data randomData(std::mt19937_64& random, std::size_t size) {
  Data data(size);
  for (std::int64_t& x : data) x = static_cast<std::int64_t>(random() % 2001) - 1000;
  return data;
}

std::size_t randomSize(std::mt19937_64& random) {
  constexpr std::size_t kSizes[] = {0, 1, 2, 3, 7, 511, 513, 4096, 4097, 20'000, 70'001, 200'001};
  return kSizes[random() % std::size(kSizes)];
}

// Each rank's host; the ranks of a host are not next to each other.
std::vector<int> randomHosts(std::mt19937_64& random) {
  std::vector<int> hosts(1 + random() % 9);
  const std::size_t numHosts = 1 + random() % hosts.size();
  for (int& host : hosts) host = static_cast<int>(random() % numHosts);
  return hosts;
}

constexpr const char* kTables[] = {
    "",
    "all_reduce=flat,reduce=flat,broadcast=binomial,all_gather=direct,reduce_scatter=direct,barrier=dissemination",
    "all_reduce=recursive_doubling,reduce=direct,broadcast=chain,all_gather=ring",
    "all_reduce=rabenseifner,reduce=hierarchical/direct,broadcast=hierarchical/chain,all_gather=hierarchical/ring",
    "all_reduce=direct",
    "all_reduce=ring,broadcast=hierarchical/binomial",
    "all_reduce=hierarchical/flat",
    "all_reduce=hierarchical/recursive_doubling",
    "all_reduce=hierarchical/rabenseifner",
    "all_reduce=hierarchical/direct",
    "all_reduce=hierarchical/ring",
};

class SpanningGroupsTest : public ::testing::TestWithParam<const char*> {
 protected:
  using Build = std::function<void(Program&, const Topology&)>;

  void forRandomGroups(const std::function<void(std::mt19937_64&, Group&)>& test) {
    for (std::uint64_t seed = 1; seed <= 12; ++seed) {
      std::mt19937_64 random(seed * 1000 + std::string_view(GetParam()).size());
      const std::vector<int> hosts = randomHosts(random);
      std::string text;
      for (const int host : hosts) text += " " + std::to_string(host);
      SCOPED_TRACE("seed " + std::to_string(seed) + ", hosts of the ranks:" + text);
      Group group(hosts, seed % 2 == 0 ? 4096 : 0, AlgorithmTable::withOverrides(GetParam()).value());
      test(random, group);
      if (HasFatalFailure()) return;
    }
  }

  void runOnAll(Group& group, const Build& build) {
    ++sequence_;
    std::vector<std::shared_ptr<TestOperation>> operations;
    for (int rank = 0; rank < group.size(); ++rank) {
      Program program;
      build(program, group[rank]->topology());
      operations.push_back(TestOperation::launch(group[rank], std::move(program), sequence_));
    }
    for (auto& operation : operations) {
      ASSERT_TRUE(operation->wait(transport::Clock::now() + std::chrono::seconds(30)));
      ASSERT_TRUE(operation->status()) << operation->status().toString();
    }
  }

  std::uint32_t sequence_ = 0;
};

TEST_P(SpanningGroupsTest, AllReduceAndReduceGiveTheSumAndTheAverage) {
  forRandomGroups([&](std::mt19937_64& random, Group& group) {
    const std::size_t n = randomSize(random);
    const int root = static_cast<int>(random() % static_cast<std::size_t>(group.size()));
    std::vector<Data> inputs;
    Data sum(n, 0);
    for (int rank = 0; rank < group.size(); ++rank) {
      inputs.push_back(randomData(random, n));
      for (std::size_t i = 0; i < n; ++i) sum[i] += inputs[rank][i];
    }
    Data average = sum;  // divided once, at the end: toward zero
    for (std::int64_t& x : average) x /= group.size();
    for (const bool divides : {false, true}) {
      const Reduction& reduction = divides ? kAverage : kSum;
      const Data& expected = divides ? average : sum;
      std::vector<Data> data = inputs;
      runOnAll(group, [&](Program& p, const Topology& t) { allReduce(p, t, reduction, sliceOf(data[t.rank])); });
      for (const Data& d : data) ASSERT_EQ(d, expected);
      data = inputs;
      runOnAll(group, [&](Program& p, const Topology& t) { reduce(p, t, reduction, root, sliceOf(data[t.rank])); });
      for (int rank = 0; rank < group.size(); ++rank) ASSERT_EQ(data[rank], rank == root ? expected : inputs[rank]);
    }
  });
}

TEST_P(SpanningGroupsTest, SumsOfFloatsHaveTheSameBitsOnEveryRank) {
  forRandomGroups([&](std::mt19937_64& random, Group& group) {
    const std::size_t n = randomSize(random);
    std::vector<std::vector<float>> data(group.size(), std::vector<float>(n));
    std::vector<double> exact(n, 0);
    double largest = 1;
    std::normal_distribution<float> normal;
    for (auto& part : data) {
      for (std::size_t i = 0; i < n; ++i) {
        part[i] = normal(random);
        exact[i] += part[i];
        largest = std::max<double>(largest, std::abs(part[i]));
      }
    }
    runOnAll(group, [&](Program& p, const Topology& t) { allReduce(p, t, kFloatSum, sliceOf(data[t.rank])); });
    for (const auto& part : data) {
      ASSERT_TRUE(n == 0 || std::memcmp(part.data(), data[0].data(), n * sizeof(float)) == 0);
    }
    for (std::size_t i = 0; i < n; ++i) ASSERT_NEAR(data[0][i], exact[i], 1e-5 * largest);
  });
}

TEST_P(SpanningGroupsTest, BroadcastAndAllGatherGiveEveryRankTheData) {
  forRandomGroups([&](std::mt19937_64& random, Group& group) {
    const int root = static_cast<int>(random() % static_cast<std::size_t>(group.size()));
    std::vector<Data> data(group.size(), Data(randomSize(random), -1));
    data[root] = randomData(random, data[root].size());
    runOnAll(group, [&](Program& p, const Topology& t) { broadcast(p, t, root, sliceOf(data[t.rank])); });
    for (const Data& d : data) ASSERT_EQ(d, data[root]);

    std::vector<Data> pieces;
    std::vector<Data> empty;
    for (int rank = 0; rank < group.size(); ++rank) {
      pieces.push_back(randomData(random, randomSize(random)));
      empty.emplace_back(pieces.back().size(), -1);
    }
    std::vector<std::vector<Data>> gathered(group.size(), empty);
    runOnAll(group, [&](Program& p, const Topology& t) {
      allGather(p, t, sliceOf(pieces[t.rank]), slicesOf(gathered[t.rank]));
    });
    for (const auto& all : gathered) ASSERT_EQ(all, pieces);
  });
}

TEST_P(SpanningGroupsTest, ReduceScatterGivesEachRankItsPiece) {
  forRandomGroups([&](std::mt19937_64& random, Group& group) {
    std::vector<std::vector<Data>> pieces(group.size());
    std::vector<Data> outputs;
    std::vector<Data> expected;
    for (int j = 0; j < group.size(); ++j) {
      const std::size_t n = randomSize(random);
      outputs.emplace_back(n, -1);
      expected.emplace_back(n, 0);
      for (int i = 0; i < group.size(); ++i) {
        pieces[i].push_back(randomData(random, n));
        for (std::size_t k = 0; k < n; ++k) expected[j][k] += pieces[i][j][k];
      }
      for (std::int64_t& x : expected[j]) x /= group.size();
    }
    const auto inputs = pieces;
    runOnAll(group, [&](Program& p, const Topology& t) {
      reduceScatter(p, t, kAverage, sliceOf(outputs[t.rank]), slicesOf(pieces[t.rank]));
    });
    ASSERT_EQ(outputs, expected);
    ASSERT_EQ(pieces, inputs);
  });
}

TEST_P(SpanningGroupsTest, NoRankLeavesABarrierBeforeTheLastHasEntered) {
  forRandomGroups([&](std::mt19937_64&, Group& group) {
    std::vector<std::shared_ptr<TestOperation>> operations;
    for (int rank = 0; rank < group.size(); ++rank) {
      for (auto& operation : operations) EXPECT_FALSE(operation->wait(transport::Clock::now()));
      Program program;
      barrier(program, group[rank]->topology());
      operations.push_back(TestOperation::launch(group[rank], std::move(program), 1));
    }
    for (auto& operation : operations) {
      EXPECT_TRUE(operation->wait(transport::Clock::now() + std::chrono::seconds(30)));
      EXPECT_TRUE(operation->status()) << operation->status().toString();
    }
  });
}

// Many at once, of kinds that use the memory of the hosts in different ways.
TEST_P(SpanningGroupsTest, CollectivesThatAreInFlightTogetherDoNotDisturbEachOther) {
  forRandomGroups([&](std::mt19937_64& random, Group& group) {
    constexpr int kOperations = 20;
    std::vector<std::vector<Data>> data(kOperations);
    std::vector<Data> expected(kOperations);
    std::vector<std::shared_ptr<TestOperation>> operations;
    for (int i = 0; i < kOperations; ++i) {
      const auto kind = random() % 3;
      const std::size_t n = std::min<std::size_t>(randomSize(random), 20'000);
      const int root = static_cast<int>(random() % static_cast<std::size_t>(group.size()));
      for (int rank = 0; rank < group.size(); ++rank) data[i].push_back(randomData(random, n));
      expected[i] = data[i][root];
      if (kind == 1) {
        expected[i].assign(n, 0);
        for (const Data& part : data[i]) {
          for (std::size_t k = 0; k < n; ++k) expected[i][k] += part[k];
        }
      }
      if (kind == 2) expected[i].clear();
      for (int rank = 0; rank < group.size(); ++rank) {
        Program program;
        const Topology& topology = group[rank]->topology();
        if (kind == 0) broadcast(program, topology, root, sliceOf(data[i][rank]));
        if (kind == 1) allReduce(program, topology, kSum, sliceOf(data[i][rank]));
        if (kind == 2) barrier(program, topology);
        operations.push_back(TestOperation::launch(group[rank], std::move(program), static_cast<std::uint32_t>(i)));
      }
    }
    for (auto& operation : operations) {
      ASSERT_TRUE(operation->wait(transport::Clock::now() + std::chrono::seconds(30)));
      ASSERT_TRUE(operation->status()) << operation->status().toString();
    }
    for (int i = 0; i < kOperations; ++i) {
      for (const Data& d : data[i]) {
        if (!expected[i].empty()) {
          ASSERT_EQ(d, expected[i]);
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Every, SpanningGroupsTest, ::testing::ValuesIn(kTables), [](const auto& info) {
  std::string name;
  for (const char c : std::string_view(info.param).substr(0, std::string_view(info.param).find(','))) {
    name += std::isalnum(c) != 0 ? c : '_';
  }
  return name.empty() ? "default" : name;
});

TEST(SpanningGroups, LongDataPassesInManyChunks) {
  for (const char* table : kTables) {
    SCOPED_TRACE(table);
    Group group({0, 1, 2, 0, 1}, 4096, AlgorithmTable::withOverrides(table).value());
    std::vector<Data> data(5, Data(1'500'001));
    for (int rank = 0; rank < 5; ++rank) {
      for (std::size_t i = 0; i < data[rank].size(); ++i) data[rank][i] = static_cast<std::int64_t>(i) * (rank + 1);
    }
    std::vector<std::shared_ptr<TestOperation>> operations;
    for (int rank = 0; rank < 5; ++rank) {
      Program program;
      allReduce(program, group[rank]->topology(), kSum, sliceOf(data[rank]));
      operations.push_back(TestOperation::launch(group[rank], std::move(program), 1));
    }
    for (auto& operation : operations) {
      ASSERT_TRUE(operation->wait(transport::Clock::now() + std::chrono::seconds(30)));
      ASSERT_TRUE(operation->status()) << operation->status().toString();
    }
    for (int rank = 0; rank < 5; ++rank) {
      for (std::size_t i = 0; i < data[rank].size(); ++i) ASSERT_EQ(data[rank][i], static_cast<std::int64_t>(i) * 15);
    }
  }
}

TEST(SpanningGroups, FlatAndDirectAddInTheOrderOfTheRanks) {
  for (const char* table : {"all_reduce=flat", "all_reduce=direct"}) {
    SCOPED_TRACE(table);
    Group group({0, 1, 1, 2}, 0, AlgorithmTable::withOverrides(table).value());
    std::mt19937_64 random(7);
    std::normal_distribution<float> normal;
    std::vector<std::vector<float>> data(4, std::vector<float>(30'001));
    std::vector<float> expected(30'001, 0);
    for (auto& part : data) {
      for (std::size_t i = 0; i < part.size(); ++i) expected[i] += part[i] = normal(random);
    }
    std::vector<std::shared_ptr<TestOperation>> operations;
    for (int rank = 0; rank < 4; ++rank) {
      Program program;
      allReduce(program, group[rank]->topology(), kFloatSum, sliceOf(data[rank]));
      operations.push_back(TestOperation::launch(group[rank], std::move(program), 1));
    }
    for (auto& operation : operations) {
      ASSERT_TRUE(operation->wait(transport::Clock::now() + std::chrono::seconds(30)));
    }
    for (const auto& part : data) EXPECT_EQ(part, expected);
  }
}

TEST(SpanningGroups, RanksOfAHostThatCallDifferentCollectivesAreToldWhoCalledWhat) {
  Group group({0, 0, 1}, 0, {});
  std::vector<Data> data{Data(4, 1), Data(5, 1), Data(4, 1)};
  std::vector<std::shared_ptr<TestOperation>> operations;
  for (int rank = 0; rank < 3; ++rank) {
    Program program;
    allReduce(program, group[rank]->topology(), kSum, sliceOf(data[rank]));
    operations.push_back(TestOperation::launch(group[rank], std::move(program), 1));
  }
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(operations[rank]->wait(transport::Clock::now() + std::chrono::seconds(10)));
    const std::string text = operations[rank]->status().toString();
    EXPECT_NE(text.find("all_reduce of 40 bytes"), std::string::npos) << text;
    EXPECT_NE(text.find("all_reduce of 32 bytes"), std::string::npos) << text;
  }
  group[2]->abort(Status::aborted("the test is over"));
  EXPECT_TRUE(operations[2]->wait(transport::Clock::now() + std::chrono::seconds(10)));
  // It keeps itself for as long as one of the others may read what it sends.
  for (const int rank : {0, 1}) {
    operations[rank].reset();
    group.end(rank);
  }
  const auto deadline = transport::Clock::now() + std::chrono::seconds(10);
  while (operations[2].use_count() > 1 && transport::Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(operations[2].use_count(), 1);
}

TEST(SpanningGroups, HostsThatGiveDifferentSizesAreTold) {
  Group group({0, 0, 1, 1}, 0, {});
  std::vector<Data> data{Data(4, 1), Data(4, 1), Data(5, 1), Data(5, 1)};
  std::vector<std::shared_ptr<TestOperation>> operations;
  for (int rank = 0; rank < 4; ++rank) {
    Program program;
    allReduce(program, group[rank]->topology(), kSum, sliceOf(data[rank]));
    operations.push_back(TestOperation::launch(group[rank], std::move(program), 1));
  }
  for (auto& operation : operations) {
    ASSERT_TRUE(operation->wait(transport::Clock::now() + std::chrono::seconds(10)));
    EXPECT_FALSE(operation->status());
  }
  const std::string text = operations[0]->status().toString();
  EXPECT_TRUE(text.find("32") != std::string::npos && text.find("40 bytes") != std::string::npos) << text;
}

TEST(SpanningGroups, ARankThatGivesUpEndsTheWaitOfTheOthersOfItsHost) {
  Group group({1, 0, 0}, 0, {});
  std::vector<Data> data(3, Data(100'000, 1));
  Program program;
  allReduce(program, group[2]->topology(), kSum, sliceOf(data[2]));
  auto operation = TestOperation::launch(group[2], std::move(program), 1);
  EXPECT_FALSE(operation->wait(transport::Clock::now() + std::chrono::milliseconds(50)));
  group[1]->abort(Status::aborted("enough"));
  ASSERT_TRUE(operation->wait(transport::Clock::now() + std::chrono::seconds(10)));
  EXPECT_NE(operation->status().toString().find("rank 1"), std::string::npos) << operation->status().toString();
}

TEST(HostLayout, HostsAreInTheOrderOfTheirFirstRanks) {
  const std::vector<std::string> identities{"b", "", "a", "b", "", "a", "b"};
  const HostLayout layout(identities);
  ASSERT_EQ(layout.numHosts(), 4);
  EXPECT_EQ(layout.ranksOf(0), (std::vector{0, 3, 6}));
  EXPECT_EQ(layout.ranksOf(1), std::vector{1});
  EXPECT_EQ(layout.ranksOf(2), (std::vector{2, 5}));
  EXPECT_EQ(layout.ranksOf(3), std::vector{4});
  EXPECT_EQ(layout.hostOf(6), 0);
  EXPECT_EQ(layout.indexOf(6), 2);
  EXPECT_EQ(layout.fewestRanks(), 1);
  EXPECT_EQ(layout.mostRanks(), 3);
}

}  // namespace
}  // namespace farandole::collective
