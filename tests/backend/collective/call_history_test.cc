#include "backend/collective/call_history.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "tests/backend/collective/communicators.h"
#include "tests/backend/collective/slices.h"
#include "tests/backend/collective/sums.h"
#include "tests/random_seed.h"

namespace farandole::collective {
namespace {

using testing::Group;
using testing::sliceOf;
using testing::TestOperation;
using Data = std::vector<std::int64_t>;

constexpr Reduction kSum{&testing::addUp<std::int64_t>, sizeof(std::int64_t), 7};

Contract someCall(std::mt19937_64& random) {
  constexpr CollectiveKind kKinds[] = {CollectiveKind::kBroadcast, CollectiveKind::kAllReduce, CollectiveKind::kReduce,
                                       CollectiveKind::kBarrier};
  return {kKinds[random() % std::size(kKinds)], static_cast<std::uint16_t>(random() % 3),
          static_cast<std::uint32_t>(random() % 3), random() % 3 * 8};
}

TEST(CallHistory, MarksDifferFromAnyDifferentCallOn) {
  std::mt19937_64 random(1);
  int numUnnoticed = 0;
  for (int i = 0; i < 6400; ++i) {
    CallHistory one, other;
    for (auto before = random() % 4; before > 0; --before) {
      const Contract call = someCall(random);
      one.add(call);
      other.add(call);
    }
    EXPECT_EQ(one.mark(), other.mark());
    const Contract mine = someCall(random);
    const Contract theirs = someCall(random);
    if (mine.isSameCall(theirs)) continue;
    one.add(mine);
    other.add(theirs);
    if (one.mark() != other.mark()) continue;
    ++numUnnoticed;
    int numLater = 0;
    for (; one.mark() == other.mark(); ++numLater) {
      const Contract call = someCall(random);
      one.add(call);
      other.add(call);
    }
    EXPECT_LT(numLater, 5);
  }
  EXPECT_LT(numUnnoticed, 200);  // 100 are expected
}

TEST(CallHistory, TellsTheLastCallsBeforeOne) {
  CallHistory history;
  for (std::uint64_t i = 0; i < 40; ++i) history.add({CollectiveKind::kAllReduce, 0, 0, i});
  const auto bytesOf = [&](std::uint64_t count) {
    std::vector<std::uint64_t> bytes;
    for (const Contract& call : history.lastOf(count)) bytes.push_back(call.bytes);
    return bytes;
  };
  EXPECT_EQ(bytesOf(40), (std::vector<std::uint64_t>{37, 38, 39}));
  EXPECT_EQ(bytesOf(26), (std::vector<std::uint64_t>{24, 25}));
  EXPECT_EQ(bytesOf(10), (std::vector<std::uint64_t>{}));
  EXPECT_EQ(CallHistory().lastOf(0).size(), 0u);
}

class DifferentCalls : public ::testing::Test {
 protected:
  using Build = std::function<void(Program&, Topology, Data&)>;

  static Build someCollective(std::mt19937_64& random, int size) {
    const int root = static_cast<int>(random() % size);
    switch (random() % 5) {
      case 0: return [=](Program& p, Topology t, Data& data) { broadcast(p, t, root, sliceOf(data)); };
      case 1: return [=](Program& p, Topology t, Data& data) { reduce(p, t, kSum, root, sliceOf(data)); };
      case 2: return [](Program& p, Topology t, Data& data) { allReduce(p, t, kSum, sliceOf(data)); };
      case 3: return [](Program& p, Topology t, Data&) { barrier(p, t); };
      default:
        return [=](Program& p, Topology t, Data& data) {
          std::vector<Slice> slices;
          slices.reserve(t.size);
          for (int rank = 0; rank < t.size; ++rank) slices.push_back({sliceOf(data).data + 8 * rank, 8});
          gather(p, t, root, slices[t.rank], slices);
        };
    }
  }

  // Each rank runs one after the other of its collectives. Whether all were told, by the end, that there are others.
  static std::vector<std::string> run(Group& group, const std::vector<std::vector<Build>>& calls) {
    std::vector<std::string> texts(group.size());
    std::vector<std::vector<Data>> data(group.size(), std::vector<Data>(calls[0].size(), Data(64, 1)));
    std::vector<std::vector<std::shared_ptr<TestOperation>>> operations(group.size());
    for (std::size_t i = 0; i < calls[0].size(); ++i) {
      for (int rank = 0; rank < group.size(); ++rank) {
        Program program;
        calls[rank][i](program, group[rank]->topology(), data[rank][i]);
        const auto sequence = static_cast<std::uint32_t>(i);
        operations[rank].push_back(TestOperation::launch(group[rank], std::move(program), sequence));
      }
    }
    // Who is told tells the others by the control plane, which these groups have not.
    const auto deadline = transport::Clock::now() + std::chrono::seconds(20);
    const auto isOver = [&] {
      bool isDone = true;
      for (auto& ofRank : operations) {
        for (auto& operation : ofRank) {
          if (operation->isDone() && !operation->status()) return true;
          isDone = isDone && operation->isDone();
        }
      }
      return isDone;
    };
    while (!isOver() && transport::Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(isOver());
    for (int rank = 0; rank < group.size(); ++rank) {
      for (auto& operation : operations[rank]) {
        if (operation->isDone() && !operation->status()) texts[rank] = operation->status().toString();
      }
    }
    for (int rank = 0; rank < group.size(); ++rank) group[rank]->abort(Status::aborted("enough"));
    for (auto& ofRank : operations) {
      for (auto& operation : ofRank) EXPECT_TRUE(operation->wait(deadline + std::chrono::seconds(20)));
    }
    return texts;
  }
};

TEST_F(DifferentCalls, AreToldBySomeRankWhereRanksShareNoMemory) {
  const std::uint64_t first = farandole::testing::someSeed();
  int numTold = 0;
  for (std::uint64_t seed = first; seed < first + 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const bool hasHosts = random() % 2 == 0;
    const int size = hasHosts ? 4 : 2 + static_cast<int>(random() % 3);
    const auto group = hasHosts ? std::make_unique<Group>(std::vector<int>{0, 1, 0, 1}, 4096, AlgorithmTable())
                                : std::make_unique<Group>(size, 4096);
    const std::size_t place = random() % 3;
    std::vector<std::vector<Build>> calls(size);
    for (std::size_t i = 0; i < 10; ++i) {
      // All hear of all in the end.
      const Build same = i < 4 ? someCollective(random, size)
                               : [](Program& p, Topology t, Data& data) { allReduce(p, t, kSum, sliceOf(data)); };
      const Build other = [root = static_cast<int>(random() % size)](Program& p, Topology t, Data& data) {
        broadcast(p, t, root, {sliceOf(data).data, 24});
      };
      const int odd = static_cast<int>(random() % size);
      for (int rank = 0; rank < size; ++rank) calls[rank].push_back(i == place && rank == odd ? other : same);
    }
    std::string all;
    for (const std::string& text : run(*group, calls)) all += text + "\n";
    EXPECT_NE(all, std::string(size, '\n'));
    if (all.find("has called other collectives") != std::string::npos) ++numTold;
  }
  EXPECT_GT(numTold, 0);  // the others meet on their host
}

TEST_F(DifferentCalls, AreToldByTheNextOneWhereNobodyWaitedInThem) {
  for (const std::vector<int>& hosts : {std::vector{0, 1}, std::vector{0, 1, 0, 1}}) {
    const int size = static_cast<int>(hosts.size());
    Group group(hosts, 4096, AlgorithmTable());
    std::vector<std::vector<Build>> calls(size);
    for (int rank = 0; rank < size; ++rank) {
      const int root = rank % 2;  // of the two hosts each is one's own
      calls[rank].push_back([=](Program& p, Topology t, Data& data) { broadcast(p, t, root, sliceOf(data)); });
      for (int i = 0; i < 4; ++i) calls[rank].push_back([](Program& p, Topology t, Data&) { barrier(p, t); });
    }
    std::string all;
    for (const std::string& text : run(group, calls)) all += text + "\n";
    EXPECT_NE(all.find("has called other collectives"), std::string::npos) << all;
    EXPECT_NE(all.find("broadcast of 512 bytes with root "), std::string::npos) << all;
    EXPECT_NE(all.find("barrier"), std::string::npos) << all;
  }
}

TEST_F(DifferentCalls, AreNoneWhereAllCallTheSame) {
  const std::uint64_t first = farandole::testing::someSeed();
  for (std::uint64_t seed = first; seed < first + 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    Group group({0, 1, 0, 2}, random() % 2 * 4096, AlgorithmTable());
    std::vector<Build> calls;
    calls.reserve(10);
    for (int i = 0; i < 10; ++i) calls.push_back(someCollective(random, group.size()));
    for (const std::string& text : run(group, std::vector(group.size(), calls))) EXPECT_EQ(text, "");
  }
}

}  // namespace
}  // namespace farandole::collective
